// A table; cells are text or nodes, columns are {title, number} or titles.
function table(columns, rows, caption) {
  const heads = columns.map((each) => (typeof each === "string" ? { title: each } : each));
  const cell = (tag) => (content, index) =>
    element(tag, { className: heads[index].number ? "number" : "" }, content);
  const head = heads.map((each, index) => {
    const node = cell("th")(each.title, index);
    node.scope = "col";
    return node;
  });
  return element(
    "table",
    {},
    element("caption", { className: "unseen" }, caption),
    element("thead", {}, element("tr", {}, head)),
    element(
      "tbody",
      {},
      rows.map((row) => element("tr", {}, row.map(cell("td")))),
    ),
  );
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const list = (value) => (Array.isArray(value) ? value : []);
const record = (value) =>
  value && typeof value === "object" && !Array.isArray(value) ? value : {};
const number = (value) => (isNumber(value) ? value : null);

// The largest and the smallest number of many; null where there is none.
const most = (values) =>
  values.filter(isNumber).reduce((a, b) => (a === null || b > a ? b : a), null);
const least = (values) =>
  values.filter(isNumber).reduce((a, b) => (a === null || b < a ? b : a), null);

// Numbers for people; "–" where there is none.
const NONE = "–";
const format = {
  fixed: (digits) => (value) => (isNumber(value) ? value.toFixed(digits) : NONE),
  loss: (value) => (isNumber(value) ? value.toFixed(4) : NONE),
  small: (value) => (isNumber(value) ? value.toExponential(2) : NONE),
  seconds: (value) => (isNumber(value) ? `${value.toFixed(value < 1 ? 4 : 3)} s` : NONE),
  rate: (value) => (isNumber(value) ? value.toFixed(1) : NONE),
  percent: (value) => (isNumber(value) ? `${(100 * value).toFixed(1)}%` : NONE),
  bytes: (value) => {
    if (!isNumber(value)) return NONE;
    const gib = value / 2 ** 30;
    return gib >= 0.1 ? `${gib.toFixed(2)} GiB` : `${(value / 2 ** 20).toFixed(1)} MiB`;
  },
  clock: (value) => (isNumber(value) ? new Date(1000 * value).toLocaleString() : NONE),
  duration: (value) => {
    if (!isNumber(value)) return NONE;
    if (value < 90) return `${value.toFixed(0)} s`;
    const minutes = Math.round(value / 60);
    return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  },
  count: (value) => (isNumber(value) ? value.toLocaleString("en") : NONE),
  value: (value) =>
    value === null || value === undefined
      ? NONE
      : typeof value === "string"
        ? value
        : JSON.stringify(value),
};

const plural = (count, word, words) => `${count} ${count === 1 ? word : words || `${word}s`}`;
