// What a screen reader says. An answer is told sentence by sentence while it comes, not by tokens.
import { byId, element } from "./elements.js";

const MOST_KEPT = 20;
/** Characters of one announcement: an endless line would keep browser and listener busy. */
const LONGEST = 2000;
const told = new WeakMap();

export function announce(text) {
  const node = byId("announcer");
  const words = text.length > LONGEST ? `${text.slice(0, LONGEST)} … and more` : text;
  node.append(element("p", {}, words));
  while (node.children.length > MOST_KEPT) node.firstElementChild.remove();
}

/** Tells what of an answer has come since the last call: whole sentences, or all at its end. */
export function announceAnswer(turn, hasEnded) {
  const { content } = turn;
  const from = told.get(turn) ?? 0;
  const ends = ["\n", ". ", "! ", "? "].map((sign) => content.lastIndexOf(sign) + 1);
  const to = hasEnded ? content.length : Math.max(...ends);
  if (to <= from) return;
  told.set(turn, to);
  announce(content.slice(from, to).trim());
}
