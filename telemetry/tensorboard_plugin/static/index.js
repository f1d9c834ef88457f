// Where TensorBoard starts the page, in a separate frame.

import { Page } from "./app.js";
import { onReload, showTab } from "./host.js";
import { ServerSource } from "./source.js";

/** Called by TensorBoard once the module is loaded. */
export async function render() {
  document.documentElement.lang = "en";
  await loadStyle();
  const root = document.createElement("div");
  root.id = "telemetry";
  document.body.append(root);
  const page = new Page(root, new ServerSource());
  onReload(() => page.refresh());
  showTab();
  window.focus(); // else keys go to TensorBoard's tab
  await page.start();
}

function loadStyle() {
  const link = document.createElement("link");
  link.rel = "stylesheet";
  link.href = new URL("./style.css", import.meta.url).href;
  return new Promise((resolve) => {
    link.onload = link.onerror = resolve;
    document.head.append(link);
  });
}
