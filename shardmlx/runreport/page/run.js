// The run, as far as its events tell of it.
const run = {
  starts: [],
  trains: [],
  vals: [],
  tests: [],
  checkpoints: [],
  resumes: [],
  stragglers: [],
  summary: null,
  stop: null,
  leftOut: null,
  log: [],
};

const KINDS = {
  start: "starts",
  train: "trains",
  val: "vals",
  test: "tests",
  checkpoint: "checkpoints",
  resume: "resumes",
  straggler: "stragglers",
};

// What an objective of preferences says of its answers: how it is named and shown, and its fields.
const MEANS = [
  ["Rewards", format.loss, ["chosen_reward", "rejected_reward"]],
  ["Margin of rewards", format.loss, ["margin"]],
  ["Accuracy", format.percent, ["accuracy"]],
  ["Log-probabilities of answers", format.rate, ["chosen_logp", "rejected_logp"]],
];

// Those of them that this run has.
function meansTold() {
  const isTold = (name) => [...run.trains, ...run.vals].some((event) => isNumber(event[name]));
  return MEANS.filter(([, , names]) => names.some(isTold));
}

function take(event) {
  if (event.event === "summary") run.summary = event;
  else if (event.event === "stop") run.stop = event;
  else if (event.event === "left_out") run.leftOut = event;
  else if (event.event in KINDS) run[KINDS[event.event]].push(event);
  if (["start", "resume", "checkpoint", "straggler", "stop"].includes(event.event)) run.log.push(event);
}

function forget() {
  for (const name of [...Object.values(KINDS), "log"]) run[name].length = 0;
  run.summary = null;
  run.stop = null;
  run.leftOut = null;
}

const last = (events) => events[events.length - 1] || null;
const start = () => record(last(run.starts));
const layout = () => record(start().layout);
const lastStep = () => number(record(last(run.trains)).step) ?? number(start().step) ?? 0;
const beginning = () => least([...run.starts, ...run.trains, ...run.vals].map((each) => each.time));

// A rank's part of a report; {} where a rank was not there, as before a restart on more machines.
const partOf = (event, rank) =>
  record(list(event.ranks).find((each) => record(each).rank === rank));

function ranks() {
  const found = new Set();
  for (const event of run.trains)
    for (const each of list(event.ranks)) found.add(record(each).rank);
  for (const each of list(layout().ranks)) found.add(record(each).rank);
  return [...found].filter(isNumber).sort((a, b) => a - b);
}

function hostOf(rank) {
  const host = record(list(layout().ranks).find((each) => record(each).rank === rank)).host;
  return typeof host === "string" ? host : "";
}

const nameOf = (rank) => (hostOf(rank) ? `rank ${rank}, ${hostOf(rank)}` : `rank ${rank}`);

function stagesOf(rank) {
  const of = record(list(layout().ranks).find((each) => record(each).rank === rank)).pipeline_rank;
  return list(layout().stages)
    .map(record)
    .filter((stage) => stage.pipeline_rank === of);
}

function layersOf(stage) {
  const first = stage.first_layer,
    count = stage.num_layers;
  const ends = [stage.has_embedding && "embedding", stage.has_lm_head && "lm_head"].filter(Boolean);
  return [count === 1 ? `layer ${first}` : `layers ${first}–${first + count - 1}`, ...ends].join(
    " + ",
  );
}

// The mean step of a rank over all reports, each weighted by its steps.
function meanOfRank(rank, field) {
  const leftOut = partOf(record(run.leftOut), rank);
  let total = number(leftOut[field]) ?? 0,
    steps = number(leftOut[`${field}_steps`]) ?? 0,
    before = null;
  for (const event of run.trains) {
    const count =
      number(event.steps) ??
      (isNumber(before) && event.step > before
        ? event.step - before
        : event.step - (number(record(run.starts[0]).step) ?? 0));
    before = event.step;
    const value = partOf(event, rank)[field];
    if (isNumber(value) && count > 0) {
      total += count * value;
      steps += count;
    }
  }
  return steps ? total / steps : null;
}

function newest(rank, field) {
  for (let i = run.trains.length - 1; i >= 0; i--) {
    const value = partOf(run.trains[i], rank)[field];
    if (isNumber(value)) return value;
  }
  return null;
}

const limitsOf = (rank) =>
  record(list(start().memory_limits ?? record(run.summary).memory_limits)[rank]);
