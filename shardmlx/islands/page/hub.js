// The page of a hub: asks it for its status, and shows it. On another machine an island's token
// stands behind # in the address, which a browser sends to nobody.
import { byId, drawn, element, fill } from "./elements.js";

const MILLISECONDS = 3000;
const COLOURS = 5;
const NONE = "–";

const shown = (value) => (typeof value === "number" ? value.toLocaleString("en") : NONE);
const loss = (value) => (typeof value === "number" ? value.toFixed(4) : NONE);

// A cell has its column's title: on a narrow screen a row stands below itself.
const cell = (titles) => (content, index) => {
  const node = element("td", {}, content);
  node.dataset.title = titles[index];
  return node;
};

function table(titles, rows) {
  const heads = titles.map((title) => element("th", { scope: "col" }, title));
  const body = rows.map((row) => element("tr", {}, row.map(cell(titles))));
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

// What to type on each machine that has not joined yet.
function joinLines(islands, status) {
  const missing = islands.filter(([, island]) => !island.joined);
  byId("join").hidden = status.ended || !missing.length;
  fill(
    byId("join-lines"),
    missing.map(([name]) =>
      element(
        "pre",
        {},
        `SHARDMLX_ISLAND_TOKEN=TOKEN_OF_${name} shardmlx train --config lora.yaml --island ${status.address} --name ${name}`,
      ),
    ),
  );
  byId("tokens").textContent =
    `Put the island's own token in: on the hub's machine it is in ${status.tokens_directory}/NAME. lora.yaml stands for your options of train. `;
  byId("tokens").append(
    status.for_this_machine
      ? "The hub listens to this machine alone: start it with --host 0.0.0.0 to let others in."
      : "",
  );
}

function going(islands, status) {
  if (status.ended) return "The run has ended.";
  if (islands.some(([, island]) => island.present)) return "The run goes on.";
  if (islands.some(([, island]) => island.joined)) return "No island trains now: the run waits.";
  return "Nobody has joined yet: the run begins with the first island.";
}

function show(status) {
  const islands = Object.entries(status.islands);
  const { mode, inner_steps: steps, encoding } = status.terms;
  const rounds = `round ${status.rounds}, ${shown(status.tokens)} tokens`;
  byId("summary").textContent = `${mode}, every ${steps} steps, ${encoding}: ${rounds}`;
  const strangers = Object.values(status.strangers).reduce((a, b) => a + b, 0);
  const notes = [
    going(islands, status),
    strangers ? `Requests refused for want of a token: ${shown(strangers)}.` : "",
    status.epsilon === null ? "" : `Privacy: epsilon ${status.epsilon.toFixed(2)}.`,
  ];
  byId("state").textContent = notes.filter(Boolean).join(" ");
  joinLines(islands, status);
  const titles = ["Island", "State", "Heard", "Step", "Tokens", "Loss", "Validation", "Late", "Refused"];
  const begun = islands.some(([, island]) => island.joined);
  fill(byId("islands"), begun ? table(titles, islands.map(islandRow)) : "None has joined yet.");
  fill(byId("losses"), curves(islands));
  const fragments = status.fragments.map((each, index) => [
    ...[String(index), each.version === null ? NONE : shown(each.version)],
    each.reports.join(", ") || NONE,
  ]);
  fill(
    byId("fragments"),
    fragments.length
      ? table(["Fragment", "Version", "Reports that wait"], fragments)
      : "None yet: the first island that joins uploads its starting weights.",
  );
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
