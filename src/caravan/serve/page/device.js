// A device's card, with the way that leads to it above.

import { make, say } from "./dom.js";
import { bytes, perSecond, percent, share, trip } from "./format.js";
import { Spark } from "./spark.js";

const USES = [
  ["weights", "weights"],
  ["kv", "KV cache"],
  ["compute", "compute"],
  ["other", "others"],
];
const STATES = { there: "connected", lost: "lost", unused: "not used" };

export class Card {
  constructor() {
    this.way = make("li", "way");
    this.name = make("h3");
    this.state = make("span", "state");
    this.about = make("p", "about quiet");
    this.cause = make("p", "note");
    this.layers = make("p", "layers");
    this.busy = make("p", "busy");
    this.memory = make("div", "memory");
    this.memory.setAttribute("role", "img");
    this.parts = new Map(USES.map(([use]) => [use, this.memory.appendChild(make("span", use))]));
    this.uses = make("p", "uses quiet");
    this.link = make("p", "link quiet");
    const spark = make("div", "spark");
    this.spark = new Spark(spark);
    this.card = make(
      "li",
      "card",
      make("div", "title", this.name, this.state),
      this.about,
      this.cause,
      make("div", "line", this.layers, this.busy),
      spark,
      this.memory,
      this.uses,
      this.link,
    );
  }

  /** Be the device of that number in the list. */
  place(list, index) {
    if (list.children[2 * index] === this.way) return;
    list.insertBefore(this.way, list.children[2 * index] ?? null);
    this.way.after(this.card);
  }

  remove() {
    this.way.remove();
    this.card.remove();
  }

  draw(device, index, model, way) {
    this.card.className = `card tone${index % 6} ${device.state}`;
    this.way.hidden = !way;
    say(this.way, way);
    say(this.name, device.name);
    say(this.state, STATES[device.state]);
    const where = device.endpoint ? `at ${device.endpoint}` : "in the server";
    const known = device.description && device.description !== device.endpoint;
    say(this.about, known ? `${device.description}, ${where}` : where);
    this.cause.hidden = !device.cause;
    say(this.cause, device.cause);
    say(this.layers, layersText(device, model));
    this.drawBusy(device);
    this.drawMemory(device.memory);
    this.link.hidden = !device.link;
    if (device.link) say(this.link, linkText(device.link));
  }

  drawBusy({ busy, name }) {
    const known = busy.filter((value) => value !== null);
    this.busy.hidden = this.spark.hidden = !known.length;
    if (!known.length) return;
    const now = busy.at(-1);
    say(this.busy, now === null ? "no answer" : `${percent(now)} busy`);
    const mean = known.reduce((sum, value) => sum + value, 0) / known.length;
    this.spark.draw(busy, 1, `${name} was computing ${percent(mean)} of the last minute`);
  }

  drawMemory({ free, total, used }) {
    this.memory.hidden = this.uses.hidden = !total;
    if (!total) return;
    const ours = Object.values(used).reduce((sum, size) => sum + size, 0);
    const sizes = { ...used, other: Math.max(0, total - free - ours) };
    for (const [use, part] of this.parts) {
      part.hidden = !sizes[use];
      part.style.width = share((sizes[use] ?? 0) / total);
    }
    const words = USES.filter(([use]) => sizes[use]).map(([use, word]) => `${word} ${bytes(sizes[use])}`);
    const text = [...words, `free ${bytes(free)} of ${bytes(total)}`].join(", ");
    this.memory.setAttribute("aria-label", `Memory: ${text}`);
    drawLegend(this.uses, sizes, free, total);
  }
}

/** The numbers beside their colours. */
function drawLegend(line, sizes, free, total) {
  const words = USES.filter(([use]) => sizes[use]).map(([use, word]) => [use, `${word} ${bytes(sizes[use])}`]);
  words.push(["free", `free ${bytes(free)} of ${bytes(total)}`]);
  while (line.children.length > words.length) line.lastChild.remove();
  words.forEach(([use, word], index) => {
    const item = line.children[index] ?? line.appendChild(make("span"));
    item.className = `use ${use}`;
    say(item, word);
  });
}

function layersText({ layers, output }, { n_layer }) {
  if (!layers) return output ? "the output layer" : "no layers";
  const [first, last] = layers;
  const many = first === last ? `layer ${first}` : `layers ${first} to ${last}`;
  const all = first === 0 && last === n_layer - 1;
  return (all ? `all ${n_layer} layers` : many) + (output && !all ? " and the output" : "");
}

function linkText({ round_trip, bytes_in, bytes_out }) {
  const time = round_trip === null ? "" : `${trip(round_trip)} round trip, `;
  return `Link: ${time}in ${perSecond(bytes_in)}, out ${perSecond(bytes_out)}`;
}

/** How what a stage needs gets there. */
export function routeText(device, index, route) {
  if (device.state !== "there") return "";
  if (!route) return device.endpoint && device.layers ? (index ? "by way of the server" : "from the server") : "";
  if (route.path === "direct") return `direct from ${route.source}, ${trip(route.round_trip)} round trip`;
  if (route.path === "within") return `from ${route.source}, within the worker`;
  if (route.path === "relay") return `from ${route.source} by way of the server: ${route.reason}`;
  return `from ${route.source}`;
}
