/**
 * The gateway over HTTP: the key, and errors that say what happened.
 *
 * The key lives in sessionStorage: it is gone with the tab.
 */

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem("streamrt.key") ?? "",
  set: (value) => sessionStorage.setItem("streamrt.key", value),
};

/** fetch, with the key. Raises ApiError with the message of the gateway's error envelope. */
export async function call(path, { headers, ...options } = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: { ...headers, ...(key.get() && { Authorization: `Bearer ${key.get()}` }) } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The gateway does not answer. Is the pipeline up?", 0);
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null); // a proxy's error page is not JSON
  throw new ApiError(body?.error?.message ?? `The gateway answered ${response.status} ${response.statusText}`, response.status);
}
