// Something small, enlarged: a histogram or pictures, step by step.

import { element, fill } from "./dom.js";
import { formatStep } from "./format.js";

export class Large {
  constructor() {
    this.title = element("h2", { id: "large-title" });
    this.step = element("b", { role: "status" });
    this.content = element("div", { class: "large-content" });
    const move = (text, label, count) =>
      element("button", { "aria-label": label, onclick: () => this.#move(count) }, text);
    this.node = element(
      "dialog",
      {
        class: "large",
        "aria-labelledby": "large-title",
        onkeydown: ({ key }) =>
          this.#move({ ArrowLeft: -1, ArrowRight: 1 }[key] ?? 0),
      },
      element(
        "header",
        {},
        this.title,
        move("‹", "Earlier", -1),
        this.step,
        move("›", "Later", 1),
        element("button", { class: "last", onclick: () => this.node.close() }, "Close"),
      ),
      this.content,
    );
  }

  /**
   * @param {string} title
   * @param {ArrayLike<number>} steps at which there is one
   * @param {number} index of the first that is shown
   * @param {(index: number, width: number, height: number) => Node[]} show
   */
  open(title, steps, index, show) {
    Object.assign(this, { steps, index, show });
    this.title.textContent = title;
    this.node.showModal();
    this.#move(0);
  }

  #move(count) {
    this.index = Math.min(Math.max(this.index + count, 0), this.steps.length - 1);
    this.step.textContent = `step ${formatStep(this.steps[this.index])}`;
    const width = this.content.clientWidth - 32;
    fill(this.content, ...this.show(this.index, width, Math.min(window.innerHeight * 0.6, 560)));
  }
}
