// Where TensorBoard starts the page, in a separate frame.

import { App } from "./app.js";
import { element } from "./dom.js";
import { followTheme, onNavigation, onReload, readLink, showTab, writeLink } from "./host.js";
import { ServerSource } from "./source.js";

/** Called by TensorBoard once the module is loaded. */
export async function render() {
  document.documentElement.lang = "en";
  await loadStyle();
  const root = element("div", { id: "telemetry" });
  document.body.append(root);
  const app = new App(root, new ServerSource(), { read: readLink, write: writeLink });
  followTheme((theme) => app.setTheme(theme));
  onReload(() => app.refresh());
  onNavigation((link) => app.follow(link));
  showTab();
  window.focus(); // else keys go to TensorBoard's tab
  await app.start();
}

function loadStyle() {
  const href = new URL("./style.css", import.meta.url).href;
  return new Promise((resolve) => {
    document.head.append(
      element("link", { rel: "stylesheet", href, onload: resolve, onerror: resolve }),
    );
  });
}
