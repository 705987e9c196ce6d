// Requests to the service of this page, with the caller's key if there is one.

import { memory } from "./dom.js";

const PATIENCE_MS = 30000;

/** An error response: code, message, field and request id. `status` 0: no response. */
export class Refused extends Error {
  constructor(status, error) {
    super(error.message ?? "");
    this.status = status;
    this.code = error.code ?? "";
    this.field = error.field ?? null;
    this.requestId = error.request_id ?? null;
  }
}

export function key() {
  return memory.read("sessionStorage", "key");
}

export function keepKey(value) {
  memory.write("sessionStorage", "key", value);
}

/** {content, milliseconds} of a JSON response. Throws Refused for anything else. */
export async function call(path, { method = "GET", body, contentType, requestId } = {}) {
  const headers = {};
  if (requestId) headers["x-request-id"] = requestId;
  if (contentType) headers["content-type"] = contentType;
  if (key()) headers.authorization = `Bearer ${key()}`;
  const started = performance.now();
  let answer, content;
  try {
    answer = await fetch(path, {
      method,
      body,
      headers,
      signal: AbortSignal.timeout(PATIENCE_MS),
      credentials: "omit",
      cache: "no-store",
    });
    content = await answer.json();
  } catch {
    if (answer && !answer.ok)
      throw new Refused(answer.status, { code: "http", message: `HTTP ${answer.status}` });
    throw new Refused(0, { code: "no_answer" });
  }
  if (!answer.ok) throw new Refused(answer.status, content.error ?? {});
  return { content, milliseconds: performance.now() - started };
}

/** The body of a request to `/predict` or `/explain`, from an image file or a row. */
export function bodyOf(item) {
  if (item.file)
    return {
      method: "POST",
      body: item.file,
      contentType: item.file.type.startsWith("image/")
        ? item.file.type
        : "application/octet-stream",
    };
  return { method: "POST", body: JSON.stringify(item.row), contentType: "application/json" };
}
