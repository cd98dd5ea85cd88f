// A line of the last minute, the newest at the right; seconds that are not known are gaps.

import { makeSvg } from "./dom.js";

const HEIGHT = 24;

export class Spark {
  constructor(place) {
    this.place = place;
    this.title = makeSvg("title");
    this.area = makeSvg("path", { class: "area" });
    this.line = makeSvg("path", { class: "curve" });
    this.svg = makeSvg("svg", { role: "img", preserveAspectRatio: "none" }, this.title, this.area, this.line);
    place.append(this.svg);
  }

  set hidden(value) {
    this.place.hidden = value;
  }

  draw(values, most, text) {
    this.svg.setAttribute("viewBox", `0 0 ${values.length - 1} ${HEIGHT}`);
    if (this.title.textContent !== text) this.title.textContent = text;
    const runs = pieces(values).map((run) => run.map(([x, value]) => [x, y(value, most)]));
    this.line.setAttribute("d", runs.map((run) => `M${run.map((point) => point.join(" ")).join("L")}`).join(""));
    this.area.setAttribute("d", runs.map(filled).join(""));
  }
}

function y(value, most) {
  // the line has a width, and half of it is above and below
  return (HEIGHT - 1 - (HEIGHT - 2) * Math.min(1, value / most)).toFixed(2);
}

/** The stretches without a gap. */
function pieces(values) {
  const found = [[]];
  values.forEach((value, x) => {
    if (value !== null) found.at(-1).push([x, value]);
    else if (found.at(-1).length) found.push([]);
  });
  return found.filter((run) => run.length);
}

function filled(run) {
  const points = run.map((point) => point.join(" ")).join("L");
  return `M${run[0][0]} ${HEIGHT}L${points}L${run.at(-1)[0]} ${HEIGHT}Z`;
}
