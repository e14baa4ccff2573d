// The page of a hub: asks it for its status, and shows it. On another machine an island's token
// stands behind # in the address, which a browser sends to nobody.
import { byId, drawn, element, fill } from "./elements.js";

const MILLISECONDS = 3000;
const COLOURS = 5;
const NONE = "–";

const shown = (value) => (typeof value === "number" ? value.toLocaleString("en") : NONE);
const loss = (value) => (typeof value === "number" ? value.toFixed(4) : NONE);

function table(titles, rows) {
  const heads = titles.map((title) => element("th", { scope: "col" }, title));
  const body = rows.map((row) => element("tr", {}, row.map((cell) => element("td", {}, cell))));
  return element(
    "table",
    {},
    element("thead", {}, element("tr", {}, heads)),
    element("tbody", {}, body),
  );
}

function state(island) {
  if (!island.joined) return "not joined";
  if (island.present) return "trains";
  return element("span", { className: "bad" }, island.leaving ? "left" : "missing");
}

function islandRow([name, island], index) {
  const { step, tokens, loss: last, val_loss: validation } = island.progress || {};
  return [
    element("span", { className: `line-${index % COLOURS}` }, `● ${name}`),
    state(island),
    island.silent === null ? NONE : `${Math.round(island.silent)} s ago`,
    ...[shown(step), shown(tokens), loss(last), loss(validation)],
    ...[shown(island.late), shown(island.refused)],
  ];
}

function curves(islands) {
  const points = islands.flatMap(([, island]) => island.losses);
  if (points.length < 2) return "No losses yet.";
  const [steps, losses] = [0, 1].map((axis) => points.map((point) => point[axis]));
  const [lastStep, least, most] = [Math.max(...steps), Math.min(...losses), Math.max(...losses)];
  const x = (step) => (1000 * step) / (lastStep || 1);
  const y = (value) => 95 - (90 * (value - least)) / (most - least || 1);
  const lines = islands.map(([, island], index) =>
    drawn("polyline", {
      class: `line-${index % COLOURS}`,
      points: island.losses.map(([step, value]) => `${x(step)},${y(value)}`).join(" "),
    }),
  );
  const label = `from ${loss(least)} to ${loss(most)}, up to step ${shown(lastStep)}`;
  const box = { viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img" };
  return [drawn("svg", { ...box, "aria-label": label }, lines), element("p", {}, label)];
}

function show(status) {
  const islands = Object.entries(status.islands);
  const { mode, inner_steps: steps, encoding } = status.terms;
  const rounds = `round ${status.rounds}, ${shown(status.tokens)} tokens`;
  byId("summary").textContent = `${mode}, every ${steps} steps, ${encoding}: ${rounds}`;
  const strangers = Object.values(status.strangers).reduce((a, b) => a + b, 0);
  const notes = [
    status.ended ? "The run has ended." : "The run goes on.",
    strangers ? `Requests refused for want of a token: ${shown(strangers)}.` : "",
    status.epsilon === null ? "" : `Privacy: epsilon ${status.epsilon.toFixed(2)}.`,
  ];
  byId("state").textContent = notes.filter(Boolean).join(" ");
  const titles = ["Island", "", "Heard", "Step", "Tokens", "Loss", "Validation", "Late", "Refused"];
  fill(byId("islands"), table(titles, islands.map(islandRow)));
  fill(byId("losses"), curves(islands));
  const fragments = status.fragments.map((each, index) => [
    ...[String(index), each.version === null ? NONE : shown(each.version)],
    each.reports.join(", ") || NONE,
  ]);
  fill(byId("fragments"), table(["Fragment", "Version", "Reports that wait"], fragments));
}

async function refresh() {
  const token = window.location.hash.slice(1);
  try {
    const answer = await fetch("status", {
      headers: token ? { authorization: `Bearer ${token}` } : {},
    });
    const status = await answer.json();
    if (answer.ok) show(status);
    else byId("state").textContent = `${status.error}: put an island's token behind # in the address`;
  } catch {
    byId("state").textContent = "The hub does not answer.";
  }
  setTimeout(refresh, MILLISECONDS);
}

refresh();
