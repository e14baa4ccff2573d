// The page: what is shown, and what happens at a key or a click.
import { announce, announceAnswer } from "./announcer.js";
import { allUnderWay, answer, isRunning, meet, server, stop, underWay } from "./answering.js";
import { useKey } from "./client.js";
import * as composer from "./composer.js";
import { create, exists, forget, idOf, load, save, titleOf } from "./conversations.js";
import { askKey, askName, askSettings, askToDelete } from "./dialogs.js";
import { byId, element, fill } from "./elements.js";
import { drawList } from "./sidebar.js";
import { read, record, tab, write } from "./storage.js";
import { answerNode, nameOf, paintAnswer, questionNode } from "./turns.js";

const SETTINGS = "shardmlx.settings";
const OPEN = "shardmlx.open";
const NO_ROOM =
  "This browser has no room left, so this is kept in this tab only: delete conversations.";
/** Pixels from the end within which a reader is taken to be at it. */
const NEAR = 60;

let settings = keptSettings();
let current = exists(tab.read(OPEN)) ? load(tab.read(OPEN)) : create();
/** The number of the question that is being edited. */
let editing = null;
const nodes = new WeakMap();

function keptSettings() {
  const kept = Object.entries(record(read(SETTINGS)));
  return Object.fromEntries(kept.filter(([, value]) => typeof value === "string"));
}

// ---------------------------------------------------------------- what is shown

function draw() {
  const shown = current.turns.map((turn, at) => {
    const node = at % 2 ? answerNode() : questionNode(turn, () => edit(at));
    nodes.set(turn, node);
    return node;
  });
  fill(byId("log"), shown);
  for (let at = 1; at < current.turns.length; at += 2) paint(current.turns[at]);
  byId("welcome").hidden = current.turns.length > 0;
  drawControls();
}

function drawControls() {
  const running = isRunning(current);
  document.body.classList.toggle("running", running);
  composer.drawKeys(running, editing !== null);
  drawConversations();
}

const drawConversations = () => drawList(current, { open, rename, discard });

function drawModel() {
  const beside = server.adapter ? ` with adapter ${server.adapter}` : "";
  byId("model").textContent = nameOf(server.model);
  byId("model").append(element("small", {}, beside));
  byId("model").title = server.model + beside;
  document.title = `${nameOf(server.model)} · shardmlx`;
}

function paint(turn) {
  const { scrollHeight, scrollTop, clientHeight } = byId("scroller");
  const isAtEnd = scrollHeight - scrollTop - clientHeight < NEAR;
  const isLast = turn === current.turns.at(-1);
  const state = { isLast, isRunning: isLast && isRunning(current), again, enterKey };
  paintAnswer(nodes.get(turn), turn, state);
  if (isAtEnd) toEnd();
}

function toEnd() {
  byId("scroller").scrollTop = byId("scroller").scrollHeight;
}

function notice(text) {
  byId("notice").textContent = text;
}

/** Returns a function that paints an answer in the next frame. A huge one takes long to paint, and
 *  is painted more seldom, so that the page still listens. */
function painter(conversation) {
  let isWaiting = false;
  let later = null;
  return function request(turn) {
    later = turn;
    if (isWaiting) return;
    isWaiting = true;
    requestAnimationFrame(() => {
      const began = performance.now();
      later = null;
      if (current === conversation && isRunning(conversation)) paint(turn);
      const pause = 2 * (performance.now() - began);
      setTimeout(() => {
        isWaiting = false;
        if (later) request(later);
      }, pause);
    });
  };
}

// ---------------------------------------------------------------- conversations

function keep(conversation) {
  notice(save(conversation) ? "" : NO_ROOM);
}

function open(conversation) {
  cancelEdit();
  current = underWay(conversation.id) ?? load(conversation.id);
  tab.write(OPEN, current.id);
  if (byId("chats").matches(":popover-open")) byId("chats").hidePopover();
  draw();
  toEnd();
  composer.focus();
}

async function rename(conversation) {
  const name = await askName(titleOf(conversation));
  if (name === null) return;
  const renamed =
    current.id === conversation.id ? current : (underWay(conversation.id) ?? load(conversation.id));
  renamed.name = name;
  keep(renamed);
  drawConversations();
}

async function discard(conversation) {
  if (!(await askToDelete(titleOf(conversation)))) return;
  stop(conversation);
  discarded.add(conversation.id);
  forget(conversation.id);
  notice("");
  if (conversation.id === current.id) open(create());
  else drawConversations();
}

/** The ids of conversations that were deleted, some while they were being answered. */
const discarded = new Set();

// ---------------------------------------------------------------- questions and answers

function send(text) {
  if (editing !== null) current.turns.length = editing;
  editing = null;
  current.turns.push({ role: "user", content: text }, { role: "assistant", content: "" });
  tab.write(OPEN, current.id);
  return reply();
}

/** Has the last question of this conversation answered. */
async function reply() {
  const conversation = current;
  const paintSoon = painter(conversation);
  notice("");
  await answer(conversation, settings, (turn, event) => {
    if (event === "grown") {
      paintSoon(turn);
      if (conversation === current) announceAnswer(turn, false);
      return;
    }
    if (discarded.has(conversation.id)) return;
    conversation.changed = Date.now();
    keep(conversation);
    if (conversation !== current) drawConversations();
    else if (event === "begun") began();
    else ended(turn);
  });
}

function began() {
  draw();
  toEnd();
  announce("Answering");
}

function ended(turn) {
  if (server.model) drawModel();
  paint(turn);
  drawControls();
  announceAnswer(turn, true);
  if (turn.error) announce(turn.error);
  else if (turn.finish === "stopped") announce("Stopped");
  if (turn.status === 401) enterKey();
}

function again() {
  if (!isRunning(current)) reply();
  composer.focusUnlessPhone();
}

function edit(at) {
  if (isRunning(current)) return;
  editing = at;
  composer.write(current.turns[at].content);
  composer.focus();
  drawControls();
}

function cancelEdit() {
  if (editing === null) return;
  editing = null;
  composer.write("");
}

async function enterKey() {
  const key = await askKey();
  if (!key) return;
  useKey(key);
  if (current.turns.at(-1)?.status === 401) reply();
  else greet();
}

async function greet() {
  try {
    await meet(settings.model);
    drawModel();
    notice("");
  } catch (error) {
    if (error.status === 401) enterKey();
    else notice(error.message);
  }
}

// ---------------------------------------------------------------- keys, clicks, other tabs

composer.listen({ send, stop: () => stop(current), isRunning: () => isRunning(current) });

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open], :popover-open")) return;
  if (isRunning(current)) stop(current);
  else if (editing !== null) {
    cancelEdit();
    drawControls();
  }
});

byId("new").addEventListener("click", () => open(create()));

byId("samples").addEventListener("click", ({ target }) => {
  if (target.tagName === "BUTTON") send(target.textContent);
});

byId("open-settings").addEventListener("click", async () => {
  const chosen = await askSettings(settings);
  if (chosen === null) return;
  settings = chosen;
  if (server.names.includes(settings.model)) server.model = settings.model;
  if (server.model) drawModel();
  notice(write(SETTINGS, JSON.stringify(settings)) ? "" : NO_ROOM);
});

/** Keeps what came; else the browser's own end of the request would look like a failure. */
function leave() {
  for (const conversation of allUnderWay()) {
    stop(conversation);
    save(conversation);
  }
}

addEventListener("beforeunload", leave);
addEventListener("pagehide", leave);
addEventListener("storage", ({ key }) => {
  // Another tab went on with a conversation, or deleted it; after `clear` the key is null.
  if (key === SETTINGS) settings = keptSettings();
  const mine = key === null || idOf(key) === current.id;
  if (mine && editing === null && !isRunning(current)) {
    current = load(current.id);
    draw();
  } else drawConversations();
});

draw();
toEnd();
greet();
