// What is asked in a dialog.
import { server } from "./answering.js";
import { byId, element, fill } from "./elements.js";

/** Opens a dialog; returns whether it was saved, and not left. */
function ask(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    const closed = () => resolve(dialog.returnValue === "save");
    dialog.addEventListener("close", closed, { once: true });
  });
}

/** Asks for one text; returns null if the dialog was left. */
async function askText(dialog, text) {
  if (dialog.open) return null;
  const field = dialog.querySelector("input");
  field.value = text;
  const answered = ask(dialog);
  field.select();
  return (await answered) ? field.value.trim() : null;
}

export const askKey = () => askText(byId("key"), "");

export const askName = (name) => askText(byId("rename"), name);

export function askToDelete(title) {
  byId("delete-what").textContent = title;
  return ask(byId("delete"));
}

/** Asks for settings; returns them, or null if the dialog was left. */
export async function askSettings(settings) {
  const dialog = byId("settings");
  const fields = [...dialog.querySelectorAll("[name]")];
  const names = server.names.length > 0 ? server.names : [settings.model ?? ""];
  const options = names.map((name) => element("option", { value: name }, name || "unknown"));
  fill(byId("model-names"), options);
  byId("most-tokens").textContent = server.most
    ? `Prompt and answer have at most ${server.most} tokens together.`
    : "";
  for (const field of fields) field.value = settings[field.name] ?? "";
  byId("model-names").value = server.model ?? names[0];
  if (!(await ask(dialog))) return null;
  return Object.fromEntries(fields.map((field) => [field.name, field.value.trim()]));
}

for (const cancel of document.querySelectorAll("dialog .cancel")) {
  cancel.addEventListener("click", () => cancel.closest("dialog").close());
}
