// The surrounding TensorBoard: reloads, the address, light or dark mode.

const PREFIX = "p.telemetry.";
const ONE_ENTRY_MS = 500;
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
let lastEntry = -Infinity;

/**
 * Calls back whenever TensorBoard has reloaded its data. The protocol is that of its experimental
 * plugin library: JSON over a MessagePort, each message to be answered by one with its id.
 */
export function onReload(callback) {
  if (window.parent === window) return;
  const { port1, port2 } = new MessageChannel();
  port1.onmessage = ({ data }) => {
    const { type, id, isReply } = JSON.parse(data);
    if (isReply) return;
    port1.postMessage(JSON.stringify({ type, id, payload: null, error: null, isReply: true }));
    if (type === "experimental.DataReloaded") callback();
  };
  window.parent.postMessage("experimental.bootstrap", "*", [port2]);
}

/** The page's values in the address, by name. */
export function readLink() {
  const ours = [...new URLSearchParams(frame().location.hash.slice(1))].filter(([name]) => name.startsWith(PREFIX));
  return Object.fromEntries(ours.map(([name, value]) => [name.slice(PREFIX.length), value]));
}

/** Puts them into the address. `isNew`: Back leads to the state before; many changes within a moment are one. */
export function writeLink(link, isNew) {
  const { hash, pathname, search } = frame().location;
  const others = hash.slice(1).split("&").filter((part) => part && !part.startsWith(PREFIX));
  const ours = Object.entries(link).filter(([, value]) => value !== "");
  const parts = [...others, ...ours.map(([name, value]) => `${PREFIX}${name}=${encodeURIComponent(value)}`)];
  const url = pathname + search + (parts.length ? `#${parts.join("&")}` : "");
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
    if (target === window || frame().location.hash.startsWith("#telemetry")) callback(readLink());
  };
  target.addEventListener("popstate", follow);
  window.addEventListener("pagehide", () => target.removeEventListener("popstate", follow));
}

/** TensorBoard's window if the page is inside of it, else its own. */
function frame() {
  try {
    return window.parent.location.origin === location.origin ? window.parent : window;
  } catch {
    return window; // a parent of another origin, such as a site that shows a report
  }
}

/** TensorBoard's own choice if the page is inside of it, else that of the browser; light on paper. */
export function followTheme(onChange) {
  const host = frame() === window ? null : frame().document.body;
  const preference = matchMedia("(prefers-color-scheme: dark)");
  const apply = ({ type } = {}) => {
    const isDark = host ? host.classList.contains("dark-mode") : preference.matches;
    document.documentElement.classList.toggle("dark", isDark && type !== "beforeprint");
    onChange(theme());
  };
  if (host) new MutationObserver(() => apply()).observe(host, { attributeFilter: ["class"] });
  preference.addEventListener("change", apply);
  for (const event of ["beforeprint", "afterprint"]) window.addEventListener(event, apply);
  apply();
}

/** The colors that the style sheet names. */
function theme() {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(`--${name}`).trim();
  const names = ["text", "muted", "line", "missing", "background", "accent", "error", "warning", "usual"];
  return {
    ...Object.fromEntries(names.map((name) => [name, color(name)])),
    note: color("muted"),
    curves: Array.from({ length: 10 }, (_, index) => color(`curve${index + 1}`)),
    font: `12px ${FONT}`,
    smallFont: `11px ${FONT}`,
  };
}
