// Light or dark: as the system has it, until the reader chooses.
import { byId } from "./elements.js";
import { read, remove, write } from "./storage.js";

const THEME = "shardmlx.theme";
const SYSTEM = matchMedia("(prefers-color-scheme: dark)");

export const isDark = () => (read(THEME) ?? (SYSTEM.matches ? "dark" : "light")) === "dark";

function apply() {
  byId("dark").media = isDark() ? "all" : "not all";
}

/** Changes from light to dark or back; what the system has too is followed from then on. */
export function toggle() {
  const wanted = isDark() ? "light" : "dark";
  if (wanted === (SYSTEM.matches ? "dark" : "light")) remove(THEME);
  else write(THEME, wanted);
  apply();
}

SYSTEM.addEventListener("change", apply);
addEventListener("storage", apply);
apply();
