// What the page says in words and numbers.

function tiles() {
  const end = record(last(run.trains)),
    best = least(run.vals.map((each) => each.loss));
  const iters = number(start().iters);
  const shares = ranks()
    .map((rank) => newest(rank, "peak_memory_bytes") / limitsOf(rank).memory_limit_bytes)
    .filter(isNumber);
  const val = record(last(run.vals)).loss,
    test = record(last(run.tests)).loss;
  const found = [
    [
      "step",
      iters === null
        ? format.count(lastStep())
        : `${format.count(lastStep())} / ${format.count(iters)}`,
      "",
    ],
    ["training loss", format.loss(end.loss), ""],
    [
      "validation loss",
      format.loss(val),
      isNumber(val) && best < val ? `best ${format.loss(best)}` : "",
    ],
    isNumber(test) ? ["test loss", format.loss(test), ""] : null,
    ["tokens/s", format.rate(end.tokens_per_second), ""],
    ["seconds a step", format.seconds(end.step_seconds), ""],
    ["bubble", format.percent(end.bubble), "mean of all ranks"],
    shares.length
      ? ["memory", format.percent(most(shares)), "of its limit, on the fullest rank"]
      : null,
  ].filter(Boolean);
  fill(
    byId("tiles"),
    found.map(([name, value, note]) =>
      element(
        "div",
        {},
        element("dt", {}, name),
        element("dd", {}, value, note ? element("small", {}, note) : null),
      ),
    ),
  );
}

// The last part of a path; the whole name of a repository.
const shortName = (name) =>
  /^[/.~]/.test(name) ? name.replace(/[/]+$/, "").split("/").pop() || name : name;

function header() {
  const options = record(start().options),
    { data_parallel: dp, pipeline_parallel: pp } = layout();
  if (typeof options.model === "string") byId("model").textContent = shortName(options.model);
  if (DATA.live) document.title = `step ${lastStep()}: ${byId("model").textContent}`;
  const schedule = record(start().schedule),
    parts = [];
  if (isNumber(dp))
    parts.push(`${plural(dp * pp, "rank")}: ${dp} data parallel × ${pp} pipeline parallel`);
  if (schedule.name) parts.push(format.value(schedule.name) + (schedule.packed ? ", packed" : ""));
  if (options.fine_tune_type) parts.push(format.value(options.fine_tune_type));
  if (typeof options.data === "string") parts.push(`data ${shortName(options.data)}`);
  if (isNumber(beginning())) parts.push(`began ${format.clock(beginning())}`);
  byId("summary").textContent =
    parts.join(" · ") ||
    "This file has no start line: it was written by an older shardmlx, so that layout, plan and options are not known.";
}

// Of a long run not all reports are shown: say which.
function leftOutNote() {
  const gone = number(record(run.leftOut).reports) ?? 0;
  const all = run.trains.length + gone;
  byId("left-out").textContent = gone
    ? `${format.count(run.trains.length)} of ${format.count(all)} reports are shown: of each stretch of steps those with the lowest and the highest loss, the largest norm and the longest step. The metrics file has all; means are of all.`
    : "";
  byId("numbers-shown").textContent = gone
    ? `${format.count(run.trains.length)} of ${format.count(all)} reports as a table`
    : "Every report as a table";
}

function rankTable() {
  const seconds = PARTS.map((part) => ({ title: part.name, number: true }));
  const columns = [
    "rank",
    "host",
    "layers",
    ...seconds,
    "mean step",
    { title: "peak memory", number: true },
    { title: "planned", number: true },
    { title: "limit", number: true },
    "part of the limit",
  ];
  const rows = ranks().map((rank) => {
    const limits = limitsOf(rank);
    return [
      String(rank),
      hostOf(rank) || NONE,
      stagesOf(rank).map(layersOf).join(", ") || NONE,
      ...PARTS.map((part) => format.seconds(meanOfRank(rank, part.field))),
      timeBar(rank),
      format.bytes(newest(rank, "peak_memory_bytes")),
      format.bytes(limits.planned_peak_bytes),
      format.bytes(limits.memory_limit_bytes),
      memoryBar(rank),
    ];
  });
  fill(byId("ranks"), table(columns, rows, "Ranks: mean step and memory"));
  const key = PARTS.map((part) => [
    element("i", { className: `swatch ${part.colour}` }),
    ` ${part.name}  `,
  ]);
  fill(
    byId("parts"),
    key.flat(),
    element("i", { className: "swatch memory" }),
    " peak memory  ",
    element("i", { className: "swatch-line memory-plan" }),
    " planned",
  );
}

function layoutAndSchedule() {
  const { data_parallel: dp } = layout(),
    schedule = record(start().schedule);
  const known = Object.keys(schedule).length > 0;
  const said = known
    ? [
        `${format.value(schedule.name)}: ${plural(schedule.microbatches, "micro-batch", "micro-batches")} of ${plural(schedule.micro_batch_size, "sequence")}${dp > 1 ? ` on each of ${dp} replicas` : ""}${schedule.packed ? ", packed" : ""}; predicted bubble ${format.percent(schedule.bubble)}.`,
      ]
    : ["Not known: the file has no start line."];
  fill(byId("layout"), layerStrip());
  const picture = schedulePicture();
  const missing =
    known && !picture
      ? "A step has too many actions to be drawn here: shardmlx schedule draws them."
      : null;
  fill(
    byId("schedule"),
    element("p", {}, ...said),
    picture,
    missing ? element("p", { className: "muted" }, missing) : null,
  );
}

function logTable() {
  const rows = run.log.map((event, index) => {
    const sign = (kind) =>
      element("span", { className: MARKS[kind].colour }, MARKS[kind].sign, " ", MARKS[kind].name);
    const step = format.count(event.step),
      when = format.clock(event.time);
    if (event.event === "checkpoint")
      return [
        step,
        when,
        sign("checkpoint"),
        `${format.bytes(event.bytes)} written in ${format.seconds(event.seconds)}; training waited ${format.seconds(event.exposed_seconds)}`,
      ];
    if (event.event === "straggler")
      return [
        step,
        when,
        sign("straggler"),
        `rank ${event.rank} on ${format.value(event.host)} computes ${format.seconds(event.compute_seconds)} a step where ${format.seconds(event.expected_seconds)} were expected${event.remedy ? `: ${format.value(event.remedy)}` : ""}`,
      ];
    if (event.event === "resume") {
      const again =
        isNumber(event.repeated_steps) && event.repeated_steps > 0
          ? `; ${plural(event.repeated_steps, "step")} made again`
          : "";
      return [step, when, sign("restart"), `from ${format.value(event.checkpoint)}${again}`];
    }
    if (event.event === "stop") return [step, when, "stop", format.value(event.reason)];
    const size = list(record(event.layout).ranks).length;
    return [
      step,
      when,
      "start",
      `shardmlx ${format.value(event.version)}${size ? ` on ${plural(size, "rank")}` : ""}`,
    ];
  });
  fill(
    byId("log"),
    rows.length
      ? table(
          [{ title: "step", number: true }, "time", "what", "details"],
          rows,
          "Checkpoints, restarts, stragglers and stops",
        )
      : element("p", { className: "muted" }, "None so far."),
  );
  const seen = Object.keys(MARKS).filter((kind) => marks().some((each) => each.kind === kind));
  fill(
    byId("marks"),
    seen.map((kind) =>
      element(
        "span",
        { className: MARKS[kind].colour },
        `${MARKS[kind].sign} ${MARKS[kind].name}  `,
      ),
    ),
  );
}

function optionTables() {
  const options = record(start().options),
    chosen = record(start().chosen),
    changed = new Set([...list(start().changed), ...Object.keys(chosen)]);
  // What was asked for, and what the run chose where that left something open.
  const value = (name) =>
    name in chosen
      ? `${format.value(options[name])}: ${format.value(chosen[name])} chosen`
      : format.value(options[name]);
  const names = Object.keys(options).sort();
  const pairs = (wanted) =>
    element(
      "dl",
      { className: "options" },
      wanted.map((name) =>
        element("div", {}, element("dt", {}, name), element("dd", {}, value(name))),
      ),
    );
  const own = names.filter((name) => changed.has(name)),
    others = names.filter((name) => !changed.has(name));
  fill(
    byId("options"),
    names.length ? pairs(own) : element("p", { className: "muted" }, "Not known."),
    others.length
      ? element(
          "details",
          {},
          element("summary", {}, `${others.length} more, at their defaults`),
          pairs(others),
        )
      : null,
  );
}

// Made when it is opened: it may be long.
function numberTable() {
  const means = meansTold().flatMap(([, show, names]) => names.map((name) => [name, show]));
  const ofVals = [["loss", format.loss], ...means];
  const fields = [
    ["loss", format.loss],
    ["learning_rate", format.small],
    ["grad_norm", format.loss],
    ["tokens", format.count],
    ["tokens_per_second", format.rate],
    ["step_seconds", format.seconds],
    ["bubble", format.percent],
    ...means,
  ];
  const columns = [
    "step",
    ...ofVals.map(([name]) => `validation_${name}`),
    ...fields.map(([name]) => name),
  ].map((title) => ({ title: title.replaceAll("_", " "), number: true }));
  const rows = new Map();
  const row = (step) =>
    rows.get(step) || rows.set(step, new Array(columns.length).fill("")).get(step);
  const put = (events, names, from) => {
    for (const event of events)
      names.forEach(([name, show], index) => {
        row(event.step)[from + index] = show(event[name]);
      });
  };
  put(run.vals, ofVals, 1);
  put(run.trains, fields, 1 + ofVals.length);
  const sorted = [...rows]
    .sort(([a], [b]) => a - b)
    .map(([step, [, ...rest]]) => [format.count(step), ...rest]);
  const per = ranks().length
    ? table(
        ["step", "rank", ...PARTS.map((part) => part.name), "peak memory"].map((title) => ({
          title,
          number: true,
        })),
        run.trains.flatMap((event) =>
          list(event.ranks)
            .map(record)
            .map((each) => [
              format.count(event.step),
              format.value(each.rank),
              ...PARTS.map((part) => format.seconds(each[part.field])),
              format.bytes(each.peak_memory_bytes),
            ]),
        ),
        "Every report of every rank",
      )
    : null;
  fill(byId("numbers").querySelector("div"), table(columns, sorted, byId("numbers-shown").textContent), per);
}
