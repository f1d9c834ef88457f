// Keeps the page up to date: on request, or every few seconds while it is visible.

import { element, fill } from "./dom.js";
import { formatStep } from "./format.js";

const EVERY_MS = 5000;

export class Live {
  /**
   * @param {(() => Promise<void>)|null} refresh null: the data does not grow
   * @param {() => boolean} isEmpty whether there is no data yet, so that the page retries
   */
  constructor(refresh, isEmpty) {
    this.refresh = refresh;
    this.isEmpty = isEmpty;
    this.isOn = false;
    this.said = ""; // why the data could not be read again
    this.node = element("div", { class: "field live" });
    document.addEventListener("visibilitychange", () => this.goOn());
  }

  /** Shows which step was read last, and the buttons. */
  draw(lastStep) {
    const known = `${lastStep} ${this.said}`;
    if (known === this.known) return; // a failure is announced once
    this.known = known;
    const about = element(
      "span",
      { class: this.said ? "failure" : "muted", title: this.said },
      `as of step ${formatStep(lastStep)}`,
      this.said ? element("span", { role: "alert" }, ` (${this.said})`) : null,
    );
    const live = {
      dataset: { key: "live" },
      "aria-pressed": String(this.isOn),
      title: `Read new data every ${EVERY_MS / 1000} seconds`,
      onclick: (event) => this.#toggle(event.currentTarget),
    };
    const reload = {
      dataset: { key: "reload" },
      title: "Reload: read new data",
      "aria-label": "Reload",
      onclick: () => this.refresh(),
    };
    const buttons = [element("button", reload, "⟳"), element("button", live, "Live")];
    fill(this.node, about, this.refresh ? element("div", {}, ...buttons) : null);
  }

  #toggle(button) {
    this.isOn = !this.isOn;
    button.setAttribute("aria-pressed", String(this.isOn));
    this.refresh();
    this.goOn();
  }

  /** Reads again in a while, if it is to. */
  goOn() {
    clearTimeout(this.timer);
    if (!this.refresh || document.hidden || !(this.isOn || this.isEmpty())) return;
    this.timer = setTimeout(async () => {
      // Another dashboard of TensorBoard's hides the frame, not the document.
      if (window.innerWidth) await this.refresh();
      this.goOn();
    }, EVERY_MS);
  }
}
