// Where a message is written.
import { byId } from "./elements.js";

const PHONE = matchMedia("(pointer: coarse)");
const message = byId("message");

export const focus = () => message.focus({ preventScroll: true });

/** On a phone the keyboard would cover the answer. */
export function focusUnlessPhone() {
  if (!PHONE.matches) focus();
}

export function write(text) {
  message.value = text;
  fit();
}

function fit() {
  message.style.height = "auto";
  message.style.height = `${message.scrollHeight}px`;
}

/** Says what the keys do. */
export function drawKeys(isRunning, isEditing) {
  const keys = isRunning ? "Esc stops the answer" : "Enter sends, Shift+Enter starts a new line";
  const hint = isEditing ? "What follows the message is replaced. Esc keeps it as it was." : keys;
  byId("send").textContent = isRunning ? "Stop" : "Send";
  byId("hint").textContent = hint;
  byId("hint").className = isEditing ? "" : "keys";
}

/** Calls `send` with what is written, or `stop` while an answer is under way. */
export function listen({ send, stop, isRunning }) {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (isRunning()) {
      stop();
      return;
    }
    const text = message.value.trim();
    if (!text) {
      focus();
      return;
    }
    write("");
    if (PHONE.matches) message.blur();
    send(text);
  });
  message.addEventListener("input", fit);
  message.addEventListener("keydown", (event) => {
    // On a phone there is no Shift+Enter: Enter is a new line, and the button sends.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || PHONE.matches) return;
    event.preventDefault();
    if (!isRunning()) byId("composer").requestSubmit();
  });
}
