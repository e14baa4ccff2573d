// What this browser keeps. What it refuses to keep, as when it has no room, this tab does.
const only = new Map();

function attempt(action, otherwise) {
  try {
    return action();
  } catch {
    return otherwise;
  }
}

/** Returns the text that is kept under a name, or null. */
export function read(name) {
  return only.get(name) ?? attempt(() => localStorage.getItem(name), null);
}

/** Keeps a text; returns whether the browser has it, and not only this tab. */
export function write(name, text) {
  const isKept = attempt(() => {
    localStorage.setItem(name, text);
    return true;
  }, false);
  if (isKept) only.delete(name);
  else only.set(name, text);
  return isKept;
}

export function remove(name) {
  only.delete(name);
  attempt(() => localStorage.removeItem(name));
}

/** Returns the names under which something is kept that begin like this. */
export function namesOf(prefix) {
  const all = new Set([...attempt(() => Object.keys(localStorage), []), ...only.keys()]);
  return [...all].filter((name) => name.startsWith(prefix));
}

/** Returns the object that a text holds; an empty one for all else. */
export function record(text) {
  const value = attempt(() => JSON.parse(text), null);
  return value !== null && typeof value === "object" && !Array.isArray(value) ? value : {};
}

/** What is kept up to the end of this tab. */
export const tab = {
  read: (name) =>
    attempt(() => sessionStorage.getItem(name), null) ?? only.get(`tab ${name}`) ?? null,
  write: (name, text) => {
    only.set(`tab ${name}`, text);
    attempt(() => sessionStorage.setItem(name, text));
  },
};
