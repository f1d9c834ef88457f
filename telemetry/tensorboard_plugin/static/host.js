// TensorBoard around the page: when it reloads, and the address that people copy.

const PREFIX = "p.telemetry.";
const ONE_ENTRY_MS = 500;
let lastEntry = -Infinity;

/**
 * Calls back whenever TensorBoard has reloaded its data. The protocol is that of its experimental
 * plugin library: JSON over a MessagePort, each message to be answered by one with its id.
 */
export function onReload(callback) {
  if (window.parent === window) return;
  const { port1, port2 } = new MessageChannel();
  port1.onmessage = (event) => {
    let message;
    try {
      message = JSON.parse(event.data);
    } catch {
      return;
    }
    if (message.isReply) return;
    const { type, id } = message;
    port1.postMessage(JSON.stringify({ type, id, payload: null, error: null, isReply: true }));
    if (type === "experimental.DataReloaded") callback();
  };
  window.parent.postMessage("experimental.bootstrap", "*", [port2]);
}

/** Moves the page's own tab into view, which TensorBoard cuts off where it has many. */
export function showTab() {
  if (frame() === window) return;
  const tab = frame().document.querySelector("[role=tab][aria-selected=true]");
  tab?.scrollIntoView({ block: "nearest", inline: "nearest" });
}

/** What the address says about the page, by name. */
export function readLink() {
  const link = {};
  for (const part of address().hash.replace(/^#/, "").split("&")) {
    const [name, value] = part.split("=").map(decode);
    if (name.startsWith(PREFIX)) link[name.slice(PREFIX.length)] = value ?? "";
  }
  return link;
}

/**
 * Puts that into the address.
 * @param {Object} link
 * @param {boolean} isNew whether the browser's Back is to lead to what was before; many such
 *   changes within a moment are one
 */
export function writeLink(link, isNew) {
  const target = address();
  const others = target.hash
    .replace(/^#/, "")
    .split("&")
    .filter((part) => part && !decode(part).startsWith(PREFIX));
  const ours = Object.entries(link)
    .filter(([, value]) => value !== "" && value != null)
    .map(([name, value]) => `${PREFIX}${encodeURIComponent(name)}=${encodeURIComponent(value)}`);
  const hash = [...others, ...ours].join("&");
  const url = target.pathname + target.search + (hash ? `#${hash}` : "");
  try {
    const { history } = frame();
    const now = performance.now();
    const isEntry = isNew && now - lastEntry > ONE_ENTRY_MS;
    if (isNew) lastEntry = now;
    history[isEntry ? "pushState" : "replaceState"](history.state, "", url);
  } catch {
    // A page from disk may forbid it; the link is a convenience.
  }
}

/** Calls back with the link when the browser goes back or forth. */
export function onNavigation(callback) {
  const target = frame();
  const follow = () => {
    // Inside of TensorBoard the address begins with the dashboard, which may be another one.
    if (target === window || address().hash.startsWith("#telemetry")) callback(readLink());
  };
  target.addEventListener("popstate", follow);
  window.addEventListener("pagehide", () => target.removeEventListener("popstate", follow));
}

function frame() {
  try {
    if (window.parent !== window && window.parent.location.origin === location.origin) {
      return window.parent;
    }
  } catch {
    // A parent of another origin: the page's own address it is.
  }
  return window;
}

function address() {
  return frame().location;
}

/** What was percent-encoded; the text itself if it was not. */
export function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
