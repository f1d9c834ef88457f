// Light or dark, and the colors that canvases need to know.

import { INFINITE_COLORS, NAN_COLORS } from "./colors.js";

/** TensorBoard's own choice if the page is inside of it, else that of the browser; light on paper. */
export function followTheme(onChange) {
  const host = hostBody();
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
export function theme() {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    text: color("text"),
    muted: color("muted"),
    line: color("line"),
    missing: color("missing"),
    background: color("background"),
    accent: color("accent"),
    isDark: document.documentElement.classList.contains("dark"),
    nan: NAN_COLORS[0],
    infinite: INFINITE_COLORS[0],
    error: color("error"),
    warning: color("warning"),
    note: color("muted"),
    curves: [1, 2, 3, 4, 5].map((number) => color(`curve${number}`)),
    font: "12px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif",
    smallFont: "11px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif",
  };
}

function hostBody() {
  try {
    return window.parent !== window ? window.parent.document.body : null;
  } catch {
    return null; // inside of a page of another origin
  }
}
