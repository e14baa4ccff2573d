// The server: its API as this page uses it.
import { tab } from "./storage.js";

const KEY = "shardmlx.key";

/** What went wrong, in a line for the reader; `status` is that of HTTP, 0 without an answer. */
export class Failure extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export function useKey(key) {
  tab.write(KEY, key);
}

async function request(path, options) {
  const headers = { "Content-Type": "application/json" };
  const key = tab.read(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The server cannot be reached. Is it still running?");
  }
  if (response.ok) return response;
  throw new Failure(await reason(response), response.status);
}

async function reason(response) {
  const seconds = Number(response.headers.get("Retry-After"));
  const when = `Try again ${seconds ? `in ${seconds} s` : "in a moment"}.`;
  if (response.status === 401) return "This server asks for an API key.";
  if (response.status === 429) return `The server is busy. ${when}`;
  const body = await response.json().catch(() => null);
  const otherwise = `The server answered with status ${response.status}.`;
  const words = String(body?.error?.message || otherwise);
  return response.status === 503 ? `${sentence(words)} ${when}` : words;
}

function sentence(words) {
  const first = words.charAt(0).toUpperCase() + words.slice(1);
  return /[.!?]$/.test(first) ? first : `${first}.`;
}

/** Returns the names of the model, how many tokens a prompt and its answer may have, and its adapter. */
export async function models(signal) {
  const { data } = await (await request("v1/models", { signal })).json();
  const [{ max_model_len: most, adapter }] = data;
  return { names: data.map(({ id }) => id), most, adapter };
}

/** Yields the chunks of an answer, as OpenAI's API streams them. */
export async function* chat(body, signal) {
  const options = { method: "POST", body: JSON.stringify({ ...body, stream: true }), signal };
  for await (const event of events(await request("v1/chat/completions", options))) {
    if (event.error) throw new Failure(sentence(String(event.error.message)));
    yield event;
  }
}

/** Yields the server-sent events of a response, parsed, up to [DONE]. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { done, value } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Failure("The connection was lost.");
    });
    if (done) return;
    const parts = (rest + value).split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      const data = lines.map((line) => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") return;
      if (data) yield parsed(data);
    }
  }
}

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new Failure("What came is not an answer: is there a proxy between that changes it?");
  }
}
