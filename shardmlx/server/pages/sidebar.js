// The list of conversations.
import { allUnderWay, isRunning } from "./answering.js";
import { button } from "./buttons.js";
import { list, titleOf } from "./conversations.js";
import { byId, element, fill } from "./elements.js";

/** Draws the list; `open`, `rename` and `discard` are called with a conversation of it. */
export function drawList(current, { open, rename, discard }) {
  const kept = list();
  const newer = allUnderWay().filter(({ id }) => !kept.some((each) => each.id === id));
  const focused = document.activeElement?.closest("#list li")?.dataset.id;
  const rows = [...newer, ...kept].map((each) => {
    const title = titleOf(each);
    const properties = { type: "button", className: "title", title, onclick: () => open(each) };
    if (each.id === current.id) properties["aria-current"] = "true";
    const opening = element("button", properties, title);
    if (isRunning(each)) opening.append(element("span", { className: "unseen" }, " (answering)"));
    const renaming = button("✎", () => rename(each), `Rename ${title}`);
    const discarding = button("✕", () => discard(each), `Delete ${title}`);
    const row = element("li", {}, opening, renaming, discarding);
    row.dataset.id = each.id;
    row.classList.toggle("running", isRunning(each));
    return row;
  });
  fill(byId("list"), rows);
  byId("nothing-kept").hidden = rows.length > 0;
  rows.find((row) => row.dataset.id === focused)?.firstElementChild.focus();
}
