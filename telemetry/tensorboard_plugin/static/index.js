// Where the page begins: in TensorBoard, in a separate frame, or in a report.

import { Page } from "./app.js";
import { onReload } from "./host.js";
import { html, render as draw } from "./preact.js";
import { Comparison } from "./runs.js";
import { EmbeddedSource, ServerSource } from "./source.js";

/** Called by TensorBoard once the module is loaded. */
export async function render() {
  document.documentElement.lang = "en";
  await loadStyle();
  const root = document.createElement("div");
  root.id = "telemetry";
  document.body.append(root);
  const page = new Page(root, new ServerSource());
  onReload(() => page.refresh());
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

/** Called by a report, which has its data in an element of its file. */
export async function renderReport() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const [run, other] = data.table.map(({ name }) => name);
  const first = data.table.length === 2 ? { run, other, mode: "run" } : { run };
  const page = new Page(document.getElementById("telemetry"), new EmbeddedSource(data), first);
  const comparison = document.querySelector(".comparison");
  page.drawMore = () => comparison && draw(html`<${Comparison} page=${page} runs=${data.table} />`, comparison);
  await page.start();
}
