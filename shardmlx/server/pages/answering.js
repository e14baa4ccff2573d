// The answers under way, at most one in a conversation.
import { messagesOf } from "./conversations.js";
import { chat, Failure, models } from "./client.js";

/** Those that are being answered, by id: the conversation, and what stops it. */
const running = new Map();

/** What is known of the server; `model` is null until it has said it, and after a failure. */
export const server = { model: null, names: [], most: null, adapter: null };

export const isRunning = ({ id }) => running.has(id);

/** Returns the conversation of this id as it is being answered, or undefined. */
export const underWay = (id) => running.get(id)?.conversation;

export const allUnderWay = () => [...running.values()].map(({ conversation }) => conversation);

export function stop({ id }) {
  running.get(id)?.control.abort();
}

/** Asks for the model's names; takes the one that was chosen, if it is still there. */
export async function meet(chosen, signal) {
  const { names, most, adapter } = await models(signal);
  const model = names.includes(chosen) ? chosen : names[0];
  Object.assign(server, { names, most, adapter, model });
}

/** Returns the parameters of a request that the settings ask for. */
function parametersOf(settings) {
  const { model, system, ...others } = settings;
  const given = Object.entries(others).filter(([, value]) => value);
  const said = (name, value) => (name === "reasoning_effort" ? value : Number(value));
  return Object.fromEntries(given.map(([name, value]) => [name, said(name, value)]));
}

/** Asks for the last answer of a conversation, in the place of the one that is there; calls
 *  `changed` with the turn at its beginning, whenever something has come, and at its end. */
export async function answer(conversation, settings, changed) {
  const turn = { role: "assistant", content: "" };
  const control = new AbortController();
  conversation.turns[conversation.turns.length - 1] = turn;
  running.set(conversation.id, { conversation, control });
  changed(turn, "begun");
  try {
    await stream(conversation, settings, turn, control.signal, () => changed(turn, "grown"));
  } catch (error) {
    if (error.name === "AbortError") {
      turn.finish = "stopped";
    } else {
      turn.error = error instanceof Failure ? error.message : `The page failed: ${error.message}`;
      turn.status = error.status ?? 0;
      server.model = null; // it may be another one after a restart
    }
  }
  running.delete(conversation.id);
  changed(turn, "ended");
}

async function stream(conversation, settings, turn, signal, grown) {
  if (!server.model) await meet(settings.model, signal);
  const body = {
    model: server.model,
    messages: messagesOf(conversation, settings.system),
    stream_options: { include_usage: true },
    ...parametersOf(settings),
  };
  const asked = performance.now();
  let first = null;
  turn.model = server.model;
  for await (const { choices, usage } of chat(body, signal)) {
    const choice = choices?.[0];
    turn.finish = choice?.finish_reason ?? turn.finish;
    const content = choice?.delta?.content ?? "";
    const thought = choice?.delta?.reasoning_content ?? "";
    if (content || thought) {
      const now = performance.now();
      first ??= now;
      if (content && turn.thought && !turn.content) turn.thinking = (now - asked) / 1000;
      turn.content += content;
      if (thought) turn.thought = (turn.thought ?? "") + thought;
      turn.tokens = (turn.tokens ?? 0) + 1;
      turn.seconds = (now - first) / 1000;
    }
    if (usage) {
      turn.tokens = usage.completion_tokens;
      turn.prompt = usage.prompt_tokens;
      turn.cached = usage.prompt_tokens_details?.cached_tokens;
      const drafts = usage.completion_tokens_details;
      turn.right = drafts?.accepted_prediction_tokens;
      turn.wrong = drafts?.rejected_prediction_tokens;
    }
    grown();
  }
  if (!turn.finish) throw new Failure("The connection ended before the answer did.");
}
