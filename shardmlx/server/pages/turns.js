// How a question and an answer look.
import { button, copyButton } from "./buttons.js";
import { element } from "./elements.js";
import { show } from "./markdown.js";

const FINISHES = { length: "cut off at max tokens", stopped: "stopped" };

export const nameOf = (model) => model.split("/").at(-1);

/** Returns the node of a question. */
export function questionNode(turn, edit) {
  const about = element("div", { className: "about" });
  about.append(button("Edit", edit, "Edit this message and send it again"));
  about.append(copyButton("Copy this message", () => turn.content));
  return article("user", "You", element("div", { className: "text" }, turn.content), about);
}

/** Returns the node of an answer, for `paintAnswer` to fill. */
export function answerNode() {
  const thought = element("details", { className: "thought", hidden: true });
  thought.append(element("summary", {}), element("div"));
  const text = element("div", { className: "text" });
  const buttons = element("span", { className: "buttons" });
  const about = element("div", { className: "about" }, element("span", {}), buttons);
  const trouble = element("div", { className: "trouble" });
  return article("answer", "Answer", thought, text, trouble, about);
}

function article(kind, name, ...parts) {
  const title = element("h2", { className: "unseen" }, name);
  return element("article", { className: `turn ${kind}` }, title, ...parts);
}

/** Brings what is shown of an answer up to date. `isLast` answers can be made `again`; where a key
 *  is wanted, `enterKey` asks for it. */
export function paintAnswer(node, turn, { isRunning, isLast, again, enterKey }) {
  show(node.querySelector(".text"), turn.content);
  paintThought(node.querySelector(".thought"), turn, isRunning);
  node.setAttribute("aria-busy", isRunning);
  const summary = node.querySelector(".about > span");
  summary.textContent = summaryOf(turn, isRunning);
  summary.title = turn.model ?? "";
  if (isRunning && node.dataset.state === "running") return;
  node.dataset.state = isRunning ? "running" : "ended";
  const buttons = [];
  const canRepeat = isLast && !isRunning;
  if (!isRunning && turn.content) buttons.push(copyButton("Copy this answer", () => turn.content));
  if (canRepeat && !turn.error) buttons.push(button("Regenerate", again, "Regenerate this answer"));
  node.querySelector(".buttons").replaceChildren(...buttons);
  const trouble = turn.error && !isRunning ? [problem(turn, canRepeat, again, enterKey)] : [];
  node.querySelector(".trouble").replaceChildren(...trouble);
}

function paintThought(node, turn, isRunning) {
  node.hidden = !turn.thought;
  if (!turn.thought) return;
  const seconds = turn.thinking ? ` for ${turn.thinking.toFixed(1)} s` : "";
  const isThinking = isRunning && !turn.content;
  node.querySelector("summary").textContent = isThinking ? "Thinking …" : `Thought${seconds}`;
  node.querySelector("div").textContent = turn.thought;
}

function problem(turn, canRepeat, again, enterKey) {
  const isBusy = turn.status === 429 || turn.status === 503;
  const line = element("p", { className: isBusy ? "error busy" : "error" }, turn.error);
  if (canRepeat && turn.status === 401) line.append(button("Enter key", enterKey));
  else if (canRepeat) line.append(button("Try again", again));
  return line;
}

function summaryOf(turn, isRunning) {
  if (isRunning && !turn.content) return turn.thought ? "Thinking …" : "Reading the prompt …";
  const rate = turn.tokens > 1 && turn.seconds > 0 ? (turn.tokens - 1) / turn.seconds : 0;
  const cached = turn.cached ? ` (${turn.cached} cached)` : "";
  const drafts = (turn.right ?? 0) + (turn.wrong ?? 0);
  return [
    turn.model && nameOf(turn.model),
    turn.tokens && `${turn.tokens} tokens`,
    rate && `${rate.toFixed(rate < 100 ? 1 : 0)} tokens/s`,
    drafts && `${turn.right} of ${drafts} drafts accepted`,
    turn.prompt && `${turn.prompt} prompt tokens${cached}`,
    // An answer whose page was left in its middle has neither an end nor an error.
    !isRunning && !turn.error && FINISHES[turn.finish ?? "stopped"],
  ]
    .filter(Boolean)
    .join(" · ");
}
