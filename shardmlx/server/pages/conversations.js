// The conversations that this browser keeps, each under a name of its own: one that is damaged, or
// has no room, takes no other with it. A question and its answer come in turn.
import { namesOf, read, record, remove, write } from "./storage.js";

const PREFIX = "shardmlx.conversation.";
const TEXTS = ["content", "thought", "model", "finish", "error"];
const NUMBERS = ["tokens", "seconds", "thinking", "prompt", "cached", "right", "wrong", "status"];
const LONGEST_TITLE = 60;

export function create() {
  const [random] = crypto.getRandomValues(new Uint32Array(1));
  const id = `${Date.now().toString(36)}-${random.toString(36)}`;
  return { id, name: "", changed: 0, turns: [] };
}

/** Returns a conversation; an empty one in the place of what cannot be read. */
export function load(id) {
  const { name, changed, turns } = record(read(PREFIX + id));
  return {
    id,
    name: typeof name === "string" ? name : "",
    changed: Number.isFinite(changed) ? changed : 0,
    turns: pairs(Array.isArray(turns) ? turns : []),
  };
}

/** Returns the turns up to the first that is none. */
function pairs(kept) {
  const turns = kept.map((each, at) => turn(each, at % 2 ? "assistant" : "user"));
  const damaged = turns.indexOf(null);
  const sound = damaged < 0 ? turns.length : damaged;
  return turns.slice(0, sound - (sound % 2));
}

function turn(kept, role) {
  if (kept?.role !== role || typeof kept.content !== "string") return null;
  const has = (type) => (name) => typeof kept[name] === type;
  const names = [...TEXTS.filter(has("string")), ...NUMBERS.filter(has("number"))];
  return { role, ...Object.fromEntries(names.map((name) => [name, kept[name]])) };
}

/** Keeps a conversation, and returns whether the browser had room for it. */
export function save({ id, name, changed, turns }) {
  return write(PREFIX + id, JSON.stringify({ name, changed, turns }));
}

export function forget(id) {
  remove(PREFIX + id);
}

export const exists = (id) => id !== null && read(PREFIX + id) !== null;

/** Returns the id of the conversation that is kept under a name; null for other names. */
export const idOf = (name) => (name?.startsWith(PREFIX) ? name.slice(PREFIX.length) : null);

/** Returns all that are kept, the last changed first. */
export function list() {
  const all = namesOf(PREFIX).map((name) => load(idOf(name)));
  return all.sort((one, other) => other.changed - one.changed);
}

export function titleOf({ name, turns }) {
  if (name) return name;
  const begin = (turns[0]?.content ?? "").slice(0, 2 * LONGEST_TITLE);
  const words = begin.replace(/\s+/g, " ").trim();
  if (!words) return "Empty conversation";
  return words.length > LONGEST_TITLE ? `${words.slice(0, LONGEST_TITLE - 2)} …` : words;
}

/** Returns what the model is told: questions that got no answer are left out, but for the last. */
export function messagesOf({ turns }, system) {
  const said = system ? [{ role: "system", content: system }] : [];
  for (let at = 0; at + 1 < turns.length; at += 2) {
    const [question, answer] = turns.slice(at, at + 2);
    if (at + 2 === turns.length) said.push(question);
    else if (answer.content) said.push(question, answer);
  }
  // Half a character, as a model may write it, is none in JSON.
  return said.map(({ role, content }) => ({ role, content: content.toWellFormed() }));
}
