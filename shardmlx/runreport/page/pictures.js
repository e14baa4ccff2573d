// Pictures beside the curves: bars of each rank, the layers, and the schedule.

// A bar of parts {size, colour, title} of a whole; a picture of what stands in words beside it.
function bar(parts, whole, ticks) {
  const W = 240,
    H = 14;
  let x = 0;
  const boxes = parts.map((part) => {
    const width = whole > 0 ? Math.min(W - x, (W * part.size) / whole) : 0;
    const box = drawn(
      "rect",
      { x, y: 0, width: Math.max(0, width), height: H, class: part.colour },
      drawn("title", {}, part.title),
    );
    x += width;
    return box;
  });
  const lines = (ticks || [])
    .filter((each) => isNumber(each.at))
    .map((each) => {
      const at = Math.min(W - 1, Math.max(1, (W * each.at) / whole));
      return drawn(
        "line",
        { x1: at, x2: at, y1: -3, y2: H + 3, class: each.colour },
        drawn("title", {}, each.title),
      );
    });
  return drawn(
    "svg",
    {
      viewBox: `0 -3 ${W} ${H + 6}`,
      class: "bar",
      "aria-hidden": "true",
      preserveAspectRatio: "none",
    },
    drawn("rect", { x: 0, y: 0, width: W, height: H, class: "whole" }),
    boxes,
    lines,
  );
}

function timeBar(rank) {
  const values = PARTS.map((part) => meanOfRank(rank, part.field));
  const longest = most(
    ranks().map((each) =>
      PARTS.reduce((sum, part) => sum + (meanOfRank(each, part.field) ?? 0), 0),
    ),
  );
  return bar(
    PARTS.map((part, i) => ({
      size: values[i] ?? 0,
      colour: part.colour,
      title: `${part.name} ${format.seconds(values[i])}`,
    })),
    longest,
  );
}

// Peak memory in the limit of the rank, with a line where the plan is.
function memoryBar(rank) {
  const peak = newest(rank, "peak_memory_bytes"),
    limits = limitsOf(rank);
  const plan = number(limits.planned_peak_bytes);
  const limit = number(limits.memory_limit_bytes);
  const whole = Math.max(limit ?? 0, peak ?? 0, plan ?? 0);
  const over = limit !== null && peak > limit;
  const share = limit ? peak / limit : null;
  const picture = bar(
    [
      {
        size: peak ?? 0,
        colour: over ? "memory-over" : "memory",
        title: `peak ${format.bytes(peak)}`,
      },
    ],
    whole,
    [{ at: plan, colour: "memory-plan", title: `planned ${format.bytes(plan)}` }],
  );
  const said = format.percent(share);
  return element(
    "div",
    { className: "beside" },
    picture,
    element("span", { className: over ? "bad" : "muted" }, said),
  );
}

// The layers in pipeline order, as wide as there are many, in the shade of their rank.
function layerStrip() {
  const stages = list(layout().stages).map(record);
  if (!stages.length) return null;
  const holders = (stage) =>
    list(layout().ranks)
      .map(record)
      .filter((each) => each.pipeline_rank === stage.pipeline_rank);
  const boxes = stages.map((stage) => {
    const who = holders(stage).map((each) => nameOf(each.rank));
    const box = element(
      "li",
      { className: `stage shade-${stage.pipeline_rank % 6}`, title: who.join("\n") },
      element("b", {}, `stage ${stage.stage}`),
      " ",
      element("span", {}, layersOf(stage)),
      element(
        "small",
        {},
        who.slice(0, 2).join("; ") + (who.length > 2 ? ` and ${who.length - 2} more` : ""),
      ),
      stage.is_trained === false ? element("small", {}, "frozen") : null,
    );
    box.style.flexGrow = Math.max(1, number(stage.num_layers) ?? 1);
    return box;
  });
  return element("ol", { className: "strip", "aria-label": "Stages in pipeline order" }, boxes);
}

const ACTION = /^(\d+)([FBIW])(\d+)$/;
const MEANINGS = {
  F: "forward",
  B: "backward",
  I: "gradient of the input",
  W: "gradients of the weights",
};

// Boxes of a step's actions in time, one row a rank: what the cost model expects of it.
function schedulePicture() {
  const schedule = record(start().schedule),
    rows = list(schedule.spans);
  if (!rows.length) return null;
  const W = 1000,
    H = 30,
    GAP = 6,
    height = rows.length * (H + GAP) - GAP;
  const total = number(schedule.makespan_seconds),
    kinds = new Set();
  const at = (part) => (total === null ? format.percent(part) : format.seconds(part * total));
  const boxes = rows.map((spans, rank) => {
    const stages = [
      ...new Set(list(spans).map(([name]) => Number((ACTION.exec(name) || [])[1]))),
    ].sort((a, b) => a - b);
    const y = rank * (H + GAP);
    return [
      drawn("rect", { x: 0, y, width: W, height: H, class: "whole" }),
      list(spans).map(([name, from, to]) => {
        const found = ACTION.exec(name);
        if (!found || !isNumber(from) || !(to > from)) return null;
        const [, stage, kind, microbatch] = found;
        kinds.add(kind);
        const turn = stages.indexOf(Number(stage)),
          x = W * from,
          width = W * (to - from);
        const title = `${name}: stage ${stage}, ${MEANINGS[kind]} of micro-batch ${microbatch}, ${at(from)} to ${at(to)}`;
        return drawn(
          "g",
          {},
          drawn("title", {}, title),
          drawn("rect", {
            x,
            y,
            width,
            height: H,
            class: `action kind-${kind} turn-${Math.min(turn, 3)}`,
          }),
          width > 7 * microbatch.length + 5
            ? drawn("text", { x: x + width / 2, y: y + H / 2, class: "action-name" }, microbatch)
            : null,
        );
      }),
    ];
  });
  const names = rows.map((_, rank) => element("span", {}, `rank ${rank}`));
  const words = `A step of the schedule ${format.value(schedule.name)} in time, one row for each rank of a pipeline. The actions are listed below.`;
  const picture = drawn(
    "svg",
    { viewBox: `0 0 ${W} ${height}`, role: "img", "aria-label": words, class: "schedule" },
    boxes.flat(2),
  );
  picture.style.height = `${Math.max(22, Math.min(38, 360 / rows.length)) * rows.length}px`;
  picture.setAttribute("preserveAspectRatio", "none");
  const key = [...kinds].map((kind) => [
    element("i", { className: `swatch kind-${kind}` }),
    ` ${kind} ${MEANINGS[kind]}  `,
  ]);
  return [
    element(
      "div",
      { className: "timeline" },
      element("div", { className: "names" }, names),
      picture,
    ),
    element(
      "p",
      { className: "legend" },
      key.flat(),
      element("i", { className: "swatch idle" }),
      " bubble",
    ),
    element(
      "details",
      {},
      element("summary", {}, "The actions in words"),
      element(
        "ol",
        { className: "actions", start: 0 },
        rows.map((spans) =>
          element(
            "li",
            {},
            list(spans)
              .map(([name]) => name)
              .join(" "),
          ),
        ),
      ),
    ),
  ];
}
