// Small buttons.
import { element } from "./elements.js";

const MILLISECONDS_SHOWN = 1500;

/** Returns a button; `about` is what a screen reader says where the label does not say enough. */
export function button(label, action, about = label) {
  const properties = { type: "button", className: "small", onclick: action, "aria-label": about };
  return element("button", properties, label);
}

/** Returns a button that copies what `text` returns at that time. */
export function copyButton(about, text) {
  return button("Copy", ({ currentTarget }) => copy(text(), currentTarget), about);
}

/** Copies a text; where the clipboard is only for https, through a selection. */
async function copy(text, source) {
  let isCopied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    isCopied = copySelected(text);
    source.focus();
  }
  const label = source.textContent;
  source.textContent = isCopied ? "Copied" : "Not copied";
  source.disabled = true;
  setTimeout(() => {
    source.textContent = label;
    source.disabled = false;
  }, MILLISECONDS_SHOWN);
}

function copySelected(text) {
  const field = element("textarea", { value: text, className: "unseen" });
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  return isCopied;
}
