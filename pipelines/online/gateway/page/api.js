// The endpoint's API: the key, JSON answers, event streams, and error messages.
//
// The key is kept in sessionStorage, so it is deleted with the tab. It is only sent to this endpoint.

const KEY = "peagle-api-key";

export const keyStore = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => sessionStorage.setItem(KEY, key),
  forget: () => sessionStorage.removeItem(KEY),
};

/** An answer other than 200; `status` is 0 if there was no answer. */
export class ApiError extends Error {
  constructor(status, message, retryAfter_s = null) {
    super(message);
    this.status = status;
    this.retryAfter_s = retryAfter_s;
  }
}

const LOST = "The connection to the endpoint was lost.";
const INTERRUPTED = "The answer was interrupted: the connection to the endpoint was lost.";

/** GET a path, such as "v1/models", as JSON. */
export async function getJson(path) {
  const response = await ask(path, { signal: AbortSignal.timeout(15_000) });
  return response.json().catch(() => {
    throw new ApiError(0, LOST);
  });
}

/**
 * Send a chat and yield its events as they arrive, as the endpoint sent them.
 *
 * Throws an ApiError if the stream ends early or contains an error.
 */
export async function* streamChat(body, signal) {
  const options = { include_usage: true, continuous_usage_stats: true };
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: options }),
    signal,
  });
  for await (const data of serverEvents(response.body, signal)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.code === "overloaded" ? 503 : 500, event.error.message);
    yield event;
  }
  throw new ApiError(0, INTERRUPTED);
}
async function ask(path, options) {
  const headers = { ...options.headers };
  if (keyStore.get()) headers.authorization = `Bearer ${keyStore.get()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    throw options.signal?.aborted && error.name === "AbortError" ? error : new ApiError(0, LOST);
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  const wait_s = Number.parseFloat(response.headers.get("retry-after"));
  const message = body?.error?.message ?? `the endpoint answered ${response.status}`;
  throw new ApiError(response.status, message, Number.isFinite(wait_s) ? wait_s : null);
}

async function* serverEvents(body, signal) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) return;
      const events = (pending + value).split("\n\n");
      pending = events.pop();
      for (const event of events) if (event.startsWith("data: ")) yield event.slice("data: ".length);
    }
  } catch (error) {
    throw signal?.aborted ? error : new ApiError(0, INTERRUPTED);
  } finally {
    reader.cancel().catch(() => {});
  }
}
