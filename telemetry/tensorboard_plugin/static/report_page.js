// Starts the page in a report: one file that holds its data.

import { App } from "./app.js";
import { EmbeddedSource } from "./embedded_source.js";
import { onNavigation, readLink, writeLink } from "./host.js";
import { followTheme } from "./theme.js";

export async function render() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.getElementById("telemetry");
  const app = new App(root, new EmbeddedSource(data), { read: readLink, write: writeLink });
  onNavigation((link) => app.follow(link));
  followTheme((theme) => app.setTheme(theme));
  await app.start();
}
