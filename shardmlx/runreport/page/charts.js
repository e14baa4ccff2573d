// Curves, drawn by uPlot. All show the same range of steps, and the same place under the pointer.
const charts = [];
let zoom = null;

const colour = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
// The colours are #rrggbb: two digits more make them let others through.
const faint = (name) => `${colour(name)}50`;

// Columns for uPlot: one of steps, and one for each line of {events, get}.
function columnsOf(lines) {
  const rows = new Map();
  lines.forEach(({ events, get }, index) => {
    for (const event of events) {
      const x = event.step,
        y = get(event);
      if (!isNumber(x) || !isNumber(y)) continue;
      if (!rows.has(x)) rows.set(x, new Array(lines.length).fill(null));
      rows.get(x)[index] = y;
    }
  });
  const xs = [...rows.keys()].sort((a, b) => a - b);
  return [xs, ...lines.map((_, index) => xs.map((x) => rows.get(x)[index]))];
}

function marks() {
  const from = (events, kind) =>
    events.map((event) => ({ kind, x: event.step })).filter((each) => isNumber(each.x));
  return [
    ...from(run.checkpoints, "checkpoint"),
    ...from(run.resumes, "restart"),
    ...from(run.stragglers, "straggler"),
  ];
}

const MARKS = {
  checkpoint: { name: "checkpoint", colour: "mark-checkpoint", sign: "▲" },
  restart: { name: "restart", colour: "mark-restart", sign: "┆" },
  straggler: { name: "straggler", colour: "mark-straggler", sign: "◆" },
};

// A checkpoint is a triangle below, a restart a dashed line, a straggler a line with a diamond.
function drawMarks(u) {
  const { left, top, width, height } = u.bbox,
    { ctx } = u,
    pixel = devicePixelRatio;
  ctx.save();
  for (const { kind, x } of marks()) {
    const at = u.valToPos(x, "x", true);
    if (at < left || at > left + width) continue;
    ctx.strokeStyle = ctx.fillStyle = colour(MARKS[kind].colour);
    ctx.lineWidth = 1.5 * pixel;
    ctx.beginPath();
    if (kind === "checkpoint") {
      const below = top + height;
      ctx.moveTo(at - 4 * pixel, below);
      ctx.lineTo(at + 4 * pixel, below);
      ctx.lineTo(at, below - 7 * pixel);
      ctx.fill();
      continue;
    }
    ctx.setLineDash(kind === "restart" ? [4 * pixel, 4 * pixel] : []);
    ctx.moveTo(at, top);
    ctx.lineTo(at, top + height);
    ctx.stroke();
    if (kind !== "straggler") continue;
    ctx.beginPath();
    for (const [dx, dy] of [
      [0, 0],
      [4.5, 4.5],
      [0, 9],
      [-4.5, 4.5],
    ])
      ctx.lineTo(at + dx * pixel, top + dy * pixel);
    ctx.fill();
  }
  ctx.restore();
}

function zoomTo(range) {
  zoom = range;
  for (const each of charts) showRange(each.plot);
}

function showRange(u) {
  const [low, high] = zoom || wholeRange();
  if (u.scales.x.min !== low || u.scales.x.max !== high) u.setScale("x", { min: low, max: high });
}

function wholeRange() {
  const xs = [...run.trains, ...run.vals].map((event) => event.step).filter(isNumber);
  if (!xs.length) return [0, 1];
  const low = least(xs),
    high = most(xs);
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

const tick = (value) => {
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e6))
    return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
  return String(Number(value.toPrecision(6)));
};

// Options of a chart with these ``lines``: {label, colour, show, get, events, fill, dash, points}.
function optionsOf(spec, lines, size) {
  const axes = {
    stroke: colour("muted"),
    font: "12px system-ui, sans-serif",
    grid: { stroke: colour("line"), width: 1 },
    ticks: { stroke: colour("line"), width: 1, size: 4 },
  };
  return {
    ...size,
    padding: [12, 12, 0, 0],
    cursor: {
      sync: { key: "run" },
      drag: { x: true, y: false, setScale: false },
      points: { size: 7 },
      bind: { dblclick: () => () => zoomTo(null) },
    },
    scales: {
      x: { time: false, auto: false, range: () => zoom || wholeRange() },
      y: { range: (u, low, high) => rangeOf(spec, low, high) },
    },
    axes: [
      {
        ...axes,
        size: 30,
        space: 60,
        incrs: [
          1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5,
          1e6,
        ],
        values: (u, values) => values.map(format.count),
      },
      { ...axes, size: 58, space: 28, values: (u, values) => values.map(tick) },
    ],
    series: [
      {
        label: "step",
        value: (u, value) => (isNumber(value) ? format.count(value) : ""),
      },
      ...lines.map((line, index) => ({
        label: line.label,
        stroke: colour(line.colour),
        width: line.fill ? 1 : 2,
        fill: line.fill ? faint(line.colour) : undefined,
        dash: line.dash,
        spanGaps: true,
        points: {
          show: line.points ?? ((u, i, from, to) => to - from < 60),
          size: 5,
          fill: colour("back"),
        },
        value: (u, value, si, i) =>
          i === null || i === undefined ? "" : line.show(line.own ? line.own(u.data, i) : value),
      })),
    ],
    bands: spec.stacked
      ? lines.slice(1).map((_, index) => ({ series: [index + 1, index + 2] }))
      : [],
    legend: { markers: { width: 2 } },
    hooks: {
      draw: [drawMarks],
      setSelect: [
        (u) => {
          const { left, width } = u.select;
          if (width > 4) zoomTo([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        },
      ],
      setCursor: [
        (u) => {
          if (u.cursor.idx === null || u.cursor.idx === undefined) showLast(u);
        },
      ],
    },
  };
}

// With no pointer over it, a chart's legend has the last values.
function showLast(u) {
  const idxs = u.data.map((column) => column.findLastIndex(isNumber));
  if (u.data[0].length) u.setLegend({ idxs: idxs.map((each) => (each < 0 ? null : each)) }, false);
}

function rangeOf(spec, low, high) {
  if (!isNumber(low) || !isNumber(high)) return [0, 1];
  if (spec.ceiling) return [0, spec.ceiling()];
  const floor = spec.fromZero ? 0 : low,
    room = (high - floor || Math.abs(high) || 1) * 0.08;
  return [spec.fromZero ? 0 : floor - room, high + room];
}

// A sentence that says what a chart shows, for who does not see it.
function inWords(spec, lines) {
  const said = lines
    .filter((line) => !line.quiet)
    .map((line) => {
      const found = line.events
        .map((event) => ({ step: event.step, value: line.get(event) }))
        .filter((each) => isNumber(each.value));
      if (!found.length) return `${line.label}: nothing yet`;
      const first = found[0],
        end = found[found.length - 1];
      return `${line.label}: ${line.show(first.value)} at step ${first.step}, ${line.show(end.value)} at step ${end.step}`;
    });
  return `${spec.title}. ${said.join("; ")}. All values are in the table under Numbers.`;
}

// Show a chart of ``spec`` {id, title, height, stacked, fromZero} in a parent; draw what is new.
function showChart(parent, spec, lines) {
  const columns = columnsOf(lines);
  const shown = charts.find((each) => each.spec.id === spec.id);
  if (shown && shown.lines.length === lines.length) {
    shown.plot.setData(columns, false);
    showRange(shown.plot);
    shown.plot.redraw(true, true);
    showLast(shown.plot);
    shown.picture.setAttribute("aria-label", inWords(spec, lines));
    return;
  }
  const picture = element("div", { className: "chart", role: "img" });
  picture.setAttribute("aria-label", inWords(spec, lines));
  const figure = element("figure", { id: spec.id }, element("figcaption", {}, spec.title), picture);
  if (shown) {
    byId(spec.id).replaceWith(figure);
    charts.splice(charts.indexOf(shown), 1)[0].plot.destroy();
  } else {
    parent.append(figure);
  }
  const size = { width: picture.clientWidth || 300, height: spec.height || 200 };
  const plot = new uPlot(optionsOf(spec, lines, size), columns, picture);
  charts.push({ spec, plot, picture, lines });
  new ResizeObserver(() =>
    plot.setSize({ width: picture.clientWidth, height: size.height }),
  ).observe(picture);
  showLast(plot);
}

function forgetCharts() {
  for (const each of charts.splice(0)) {
    each.plot.destroy();
    byId(each.spec.id).remove();
  }
}

const line = (label, name, events, get, show, more) => ({
  label,
  colour: name,
  events,
  get,
  show,
  ...more,
});

function curves() {
  const parent = byId("curves"),
    options = record(start().options);
  const of = (field) => (event) => event[field];
  showChart(parent, { id: "curve-loss", title: "Loss" }, [
    line("training", "accent", run.trains, of("loss"), format.loss),
    line("validation", "second", run.vals, of("loss"), format.loss, { points: true }),
  ]);
  for (const [title, show, names] of meansTold()) {
    const lines = names.flatMap((name, index) => {
      const colours = ["accent", "second"],
        side = names.length > 1 ? `${name.split("_")[0]}, ` : "";
      return [
        line(`${side}training`, colours[index], run.trains, of(name), show),
        line(`${side}validation`, colours[index], run.vals, of(name), show, {
          dash: [6, 4],
          points: true,
        }),
      ];
    });
    showChart(parent, { id: `curve-${names[0].replace("_", "-")}`, title }, lines);
  }
  showChart(parent, { id: "curve-rate", title: "Tokens per second", fromZero: true }, [
    line("tokens/s", "accent", run.trains, of("tokens_per_second"), format.rate),
  ]);
  showChart(parent, { id: "curve-learning-rate", title: "Learning rate", fromZero: true }, [
    line("learning rate", "accent", run.trains, of("learning_rate"), format.small),
  ]);
  const clip = number(options.max_grad_norm);
  showChart(parent, { id: "curve-norm", title: "Global gradient norm", fromZero: true }, [
    line("norm", "accent", run.trains, of("grad_norm"), format.loss),
    ...(clip === null
      ? []
      : [
          line("clipped to", "second", run.trains, () => clip, format.value, {
            dash: [6, 4],
            points: false,
            quiet: true,
          }),
        ]),
  ]);
  const planned = number(record(record(start().predicted).data).step_seconds);
  showChart(parent, { id: "curve-step", title: "Seconds of a step", fromZero: true }, [
    line("measured", "accent", run.trains, of("step_seconds"), format.seconds),
    ...(planned === null
      ? []
      : [
          line("planned", "second", run.trains, () => planned, format.seconds, {
            dash: [6, 4],
            points: false,
            quiet: true,
          }),
        ]),
  ]);
}

const PARTS = [
  { name: "compute", field: "compute_seconds", colour: "part-compute" },
  { name: "exposed communication", field: "exposed_comm_seconds", colour: "part-comm" },
  { name: "bubble", field: "idle_seconds", colour: "part-idle" },
];

// The seconds of a rank's first ``count`` parts in a report, together.
function secondsOf(event, rank, count = PARTS.length) {
  const part = partOf(event, rank);
  const values = PARTS.slice(0, count).map((each) => part[each.field]);
  return values.every(isNumber) ? values.reduce((a, b) => a + b, 0) : null;
}

let highest = null;

// The stacked seconds of each rank, all to the same height: uPlot is given sums, the legend parts.
function rankCurves() {
  highest = most(ranks().flatMap((rank) => run.trains.map((event) => secondsOf(event, rank))));
  for (const rank of ranks()) {
    const lines = [...PARTS].reverse().map((part, index) => {
      const get = (event) => secondsOf(event, rank, PARTS.length - index);
      const own = (data, i) => data[index + 1][i] - (data[index + 2]?.[i] ?? 0);
      const more = { fill: true, own, points: () => false };
      return line(part.name, part.colour, run.trains, get, format.seconds, more);
    });
    const title = `Seconds of a step on ${nameOf(rank)}`;
    const spec = { id: `rank-${rank}`, title, stacked: true, height: 150 };
    showChart(byId("rank-curves"), { ...spec, ceiling: () => 1.06 * (highest || 1) }, lines);
  }
}
