// What is asked of the server: JSON and streams of events, with the key if there is one.

const KEY = "caravan.key";

/** An answer that is an error, in OpenAI's format or not. */
export class ApiError extends Error {
  constructor(message, status = 0, retryAfter = 0) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** The response; throws ApiError, and AbortError after `signal`. */
async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: { ...headers(), ...options.headers } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer.");
  }
  if (response.ok) return response;
  if (response.status === 401) dispatchEvent(new Event("key-wanted"));
  const retryAfter = Number(response.headers.get("Retry-After")) || 0;
  throw new ApiError(await reason(response), response.status, retryAfter);
}

async function reason(response) {
  try {
    const body = await response.json();
    return body.error?.message ?? body.detail ?? response.statusText;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

export async function getJson(path) {
  return (await ask(path, { cache: "no-store" })).json();
}

/** The parts of an answer as they come. Leaving the loop, or `signal`, hangs up. */
export async function* streamJson(path, body, signal) {
  const response = await ask(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const part = JSON.parse(data);
    if (part.error) throw new ApiError(part.error.message ?? "The answer broke off.");
    yield part;
  }
  throw new ApiError("The answer broke off.");
}

/** The data of server-sent events. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trim();
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
