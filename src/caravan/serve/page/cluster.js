// The cluster, once a second: work, stages, a card for each device, losses.

import { getJson } from "./api.js";
import { Card, routeText } from "./device.js";
import { make, say } from "./dom.js";
import { count, duration, share } from "./format.js";
import { Spark } from "./spark.js";

const PERIOD = 1000;
const MOST_PERIOD = 10000;
const byId = (id) => document.getElementById(id);

export class Cluster {
  constructor() {
    this.cards = new Map();
    this.states = new Map();
    this.spark = new Spark(byId("gen-spark"));
    this.period = PERIOD;
    this.timer = 0;
    document.addEventListener("visibilitychange", () => this.look());
    this.look();
  }

  /** Ask, and again in a second while anybody looks. */
  async look() {
    clearTimeout(this.timer);
    if (document.hidden) return;
    try {
      this.draw(await getJson("cluster"));
      this.period = PERIOD;
    } catch (error) {
      // with a key it is asked again
      if (error.status === 401) return this.trouble("The API key that this server wants is missing.");
      this.trouble(error.message);
      this.period = Math.min(2 * this.period, MOST_PERIOD);
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.look(), this.period);
  }

  trouble(text) {
    const line = byId("trouble");
    line.hidden = !text;
    say(line, text);
  }

  draw(found) {
    document.body.classList.toggle("alone", !found.devices);
    if (!found.devices) return;
    byId("pipeline").hidden = false;
    this.trouble(this.troubleOf(found));
    this.drawWork(found);
    this.drawStages(found);
    this.drawDevices(found);
    this.drawLosses(found.losses);
    this.tell(found.devices);
  }

  troubleOf({ model, work, losses }) {
    if (work?.error) return `Nothing is computed any more: ${work.error}`;
    if (losses.waiting) {
      const { device, seconds } = losses.waiting;
      return `Waiting for ${device} to come back, ${duration(seconds)} at most.`;
    }
    return model.changing ? "The model is being put on its devices." : "";
  }

  drawWork({ work }) {
    byId("work").hidden = !work;
    if (!work) return;
    const busy = work.slots.filter((slot) => slot.busy).length;
    say(byId("gen-rate"), rate(work.gen_rate.at(-1)));
    say(byId("prompt-rate"), rate(work.prompt_rate.at(-1)));
    say(byId("busy-slots"), `${busy}/${work.slots.length}`);
    say(byId("queued"), String(work.queued));
    const most = Math.max(1, ...work.gen_rate);
    this.spark.draw(work.gen_rate, most, `Tokens a second over the last minute, ${rate(most)} at most`);
    this.drawSlots(work);
    const ended = Object.values(work.finished).reduce((sum, number) => sum + number, 0);
    const refused = work.refused ? `, ${count(work.refused)} refused` : "";
    const cached = work.n_cached ? ` (and ${count(work.n_cached)} cached)` : "";
    const text = `${count(ended)} answer${ended === 1 ? "" : "s"}${refused} · ${count(work.n_gen)} tokens generated, ${count(work.n_prompt)} read${cached}`;
    say(byId("totals"), text);
  }

  drawSlots({ slots, n_ctx }) {
    const list = byId("slots");
    while (list.children.length > slots.length) list.lastChild.remove();
    slots.forEach((slot, index) => {
      const item = list.children[index] ?? list.appendChild(makeSlot());
      item.className = slot.busy ? (slot.reading ? "reading" : "writing") : "free";
      item.firstChild.style.width = share(slot.n_held / n_ctx);
      const state = slot.busy ? (slot.reading ? "reads" : `token ${slot.n_gen}`) : "free";
      say(item.lastChild, state);
      item.title = `Slot ${index + 1}: ${state}; holds ${count(slot.n_held)} of ${count(n_ctx)} tokens`;
    });
  }

  /** The layers as a train, each stage as long as it has layers. */
  drawStages({ devices, model }) {
    const stages = devices.filter((device) => device.layers || device.output);
    const list = byId("train");
    say(byId("layers"), `${model.description}, ${model.n_layer} layers`);
    list.hidden = stages.length < 2;
    while (list.children.length > stages.length) list.lastChild.remove();
    stages.forEach((device, index) => {
      const item = list.children[index] ?? list.appendChild(makeStage());
      const [first, last] = device.layers ?? [model.n_layer, model.n_layer];
      item.className = device.state === "lost" ? "lost" : `tone${devices.indexOf(device) % 6}`;
      item.style.flexGrow = last - first + 1;
      say(item.firstChild, device.name);
      item.lastChild.style.width = share(device.busy.at(-1) ?? 0);
      item.title = `${device.name}: ${device.layers ? `layers ${first} to ${last}` : "the output"}`;
    });
  }

  drawDevices({ devices, routes, model }) {
    const list = byId("devices");
    const names = new Set(devices.map((device) => device.name));
    for (const [name, card] of this.cards) {
      if (!names.has(name)) {
        card.remove();
        this.cards.delete(name);
      }
    }
    devices.forEach((device, index) => {
      if (!this.cards.has(device.name)) this.cards.set(device.name, new Card());
      this.cards.get(device.name).place(list, index);
      const route = routes.find((one) => one.target === device.name);
      this.cards.get(device.name).draw(device, index, model, routeText(device, index, route));
    });
  }

  drawLosses({ count: number, recent }) {
    byId("losses").hidden = !number;
    say(byId("loss-count"), String(number));
    const lines = recent.toReversed().map(lossText);
    const list = byId("loss-list");
    if (lines.join("\n") === list.dataset.lines) return;
    list.dataset.lines = lines.join("\n");
    list.replaceChildren(...lines.map((line) => make("li", "", line)));
  }

  /** For those who listen: what has changed about the devices. */
  tell(devices) {
    const news = [];
    for (const { name, state } of devices) {
      const before = this.states.get(name);
      if (before && before !== state) news.push(state === "there" ? `${name} is back.` : `${name} is ${state}.`);
      this.states.set(name, state);
    }
    if (news.length) say(byId("news"), news.join(" "));
  }
}

function makeSlot() {
  return make("li", "", make("span", "fill"), make("span", "word"));
}

function makeStage() {
  return make("li", "", make("span", "word"), make("span", "fill"));
}

function rate(value) {
  if (value === null || value === undefined) return "–";
  return value < 99.95 ? value.toFixed(1) : count(Math.round(value));
}

function lossText({ time, devices, cause, gone, seconds, n_tokens }) {
  const left = Object.keys(gone);
  const end = left.length ? `went on without ${left.join(", ")} after` : "back after";
  const again = n_tokens ? `, ${count(n_tokens)} tokens read again` : "";
  const at = new Date(time * 1000).toLocaleTimeString();
  return `${at}: ${devices.join(", ")} lost (${cause}), ${end} ${duration(seconds)}${again}`;
}
