// The conversation: sent, streamed, stopped, done again; kept in this browser.

import { ApiError, streamJson } from "./api.js";
import { button, copyButton, make } from "./dom.js";
import { show } from "./markdown.js";

const KEY = "caravan.chat";
const IDEAS = [
  "Explain in three sentences how a camel stores water.",
  "Write a haiku about machines that work together.",
  "Give me a Python function that reverses a linked list.",
];
const ENDS = {
  length: "cut off: the most tokens, or the end of the context",
  stopped: "stopped",
};
const byId = (id) => document.getElementById(id);

export class Chat {
  constructor() {
    this.log = byId("log");
    this.prompt = byId("prompt");
    this.send = byId("send");
    this.kept = read();
    this.cleared = null;
    this.stopper = null;
    // of each message: its article, with the places of text and foot
    this.shown = new Map();
    this.settings = ["system", "temperature", "max-tokens"].map(byId);
    for (const field of this.settings) {
      field.value = this.kept.settings[field.id] ?? "";
      field.addEventListener("change", () => this.keep());
    }
    this.listen();
    this.draw();
    this.fit();
  }

  listen() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.stopper) this.stop();
      else this.say(this.prompt.value.trim());
    });
    this.prompt.addEventListener("input", () => this.fit());
    this.prompt.addEventListener("keydown", (event) => {
      // an input method uses Enter for its own ends
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.stopper) this.say(this.prompt.value.trim());
    });
    addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.stopper) this.stop();
    });
    byId("settings").addEventListener("keydown", (event) => {
      // else it would send what is written above
      if (event.key === "Enter" && event.target.tagName === "INPUT") event.preventDefault();
    });
    addEventListener("pagehide", () => this.keep());
    byId("again").addEventListener("click", () => this.again());
    byId("clear").addEventListener("click", () => this.clear());
    byId("settings-button").addEventListener("click", (event) => {
      const hidden = byId("settings").toggleAttribute("hidden");
      event.currentTarget.setAttribute("aria-expanded", String(!hidden));
      this.follow();
    });
  }

  // what the buttons do

  say(text) {
    if (!text) return;
    this.cleared = null;
    this.kept.messages.push({ role: "user", content: text });
    this.prompt.value = "";
    this.fit();
    this.draw();
    this.answer();
  }

  stop() {
    this.stopper?.abort();
    this.prompt.focus();
  }

  again() {
    const messages = this.kept.messages;
    while (messages.length && messages.at(-1).role === "assistant") messages.pop();
    this.draw();
    if (messages.length) this.answer();
    this.prompt.focus();
  }

  /** Back to before a message, which can be changed. */
  edit(message) {
    this.stop();
    this.prompt.value = message.content;
    this.kept.messages.length = this.kept.messages.indexOf(message);
    this.keep();
    this.draw();
    this.fit();
    this.prompt.focus();
  }

  /** Forget all, or, until something is sent, have it back. */
  clear() {
    this.stop();
    if (this.cleared) [this.kept.messages, this.cleared] = [this.cleared, null];
    else [this.kept.messages, this.cleared] = [[], this.kept.messages];
    this.keep();
    this.draw();
    this.prompt.focus();
  }

  // an answer

  async answer() {
    const message = { role: "assistant", content: "" };
    const stopper = new AbortController();
    const body = this.body();
    this.kept.messages.push(message);
    this.stopper = stopper;
    this.draw();
    this.follow();
    const began = performance.now();
    let first = 0;
    let drawn = 0;
    try {
      for await (const part of streamJson("v1/chat/completions", body, stopper.signal)) {
        const choice = part.choices?.[0];
        if (choice?.delta?.content) {
          first ||= performance.now();
          message.content += choice.delta.content;
          drawn ||= requestAnimationFrame(() => {
            drawn = 0;
            this.drawNewest(message);
          });
        }
        if (choice?.finish_reason) message.end = choice.finish_reason;
        if (part.usage) message.facts = facts(part.usage, began, first);
      }
    } catch (error) {
      if (stopper.signal.aborted) message.end = "stopped";
      else this.fail(message, error);
    }
    if (drawn) cancelAnimationFrame(drawn);
    if (this.stopper === stopper) this.stopper = null;
    this.keep();
    this.draw();
  }

  body() {
    const [system, temperature, most] = this.settings.map((field) => field.value.trim());
    // what had no answer is not asked again
    const messages = this.kept.messages
      .filter(({ content }, index, all) => content && (all[index + 1]?.content ?? true))
      .map(({ role, content }) => ({ role, content }));
    if (system) messages.unshift({ role: "system", content: system });
    const body = { messages };
    if (this.model) body.model = this.model;
    if (temperature !== "") body.temperature = Number(temperature);
    if (most !== "") body.max_tokens = Number(most);
    return body;
  }

  fail(message, error) {
    if (!(error instanceof ApiError)) console.error(error);
    message.error = error.message;
    if (error.retryAfter) message.error += `; try again in ${error.retryAfter} s`;
  }

  // drawing

  draw() {
    const messages = this.kept.messages;
    const busy = this.stopper !== null;
    const near = this.isNear();
    this.log.setAttribute("aria-busy", String(busy));
    this.drawMessages(messages, busy);
    this.send.textContent = busy ? "Stop" : "Send";
    this.send.classList.toggle("stop", busy);
    byId("again").hidden = busy || !messages.length;
    byId("clear").hidden = !messages.length && !this.cleared;
    byId("clear").textContent = this.cleared ? "Undo" : "Clear";
    this.follow(near);
  }

  /** What is there already stays as it is: it would be read out again. */
  drawMessages(messages, busy) {
    for (const [message, { article }] of this.shown) {
      if (messages.includes(message)) continue;
      article.remove();
      this.shown.delete(message);
    }
    this.log.querySelector(".welcome")?.remove();
    if (!messages.length) this.log.append(this.welcome());
    messages.forEach((message, index) => {
      if (!this.shown.has(message)) this.shown.set(message, this.begin(message));
      const { article, text, foot } = this.shown.get(message);
      const growing = busy && index === messages.length - 1;
      article.classList.toggle("growing", growing);
      if (message.role === "assistant") show(text, message.content);
      if (!growing && !foot.hasChildNodes()) foot.append(...this.foot(message));
    });
  }

  begin(message) {
    const own = message.role === "user";
    const text = make("div", "text", own ? message.content : "");
    const foot = make("div", "foot quiet");
    const title = make("h3", "unseen", own ? "You" : "Answer");
    const article = make("article", own ? "own" : "answer", title, text, foot);
    this.log.append(article);
    return { article, text, foot };
  }

  /** What stands below a message. */
  foot(message) {
    if (message.role === "user") return [button("Edit", () => this.edit(message))];
    const parts = [];
    if (message.error) parts.push(make("p", "note", message.error));
    const words = [ENDS[message.end], message.facts].filter(Boolean);
    if (words.length) parts.push(make("span", "", words.join(" · ")));
    if (message.content) parts.push(copyButton(() => message.content));
    return parts;
  }

  drawNewest(message) {
    const place = this.shown.get(message);
    if (!place) return;
    const near = this.isNear();
    show(place.text, message.content);
    this.follow(near);
  }

  welcome() {
    const ideas = IDEAS.map((idea) => button(idea, () => this.say(idea), "idea"));
    const text = "Ask the model something. What you write stays between this browser and the server.";
    return make("div", "welcome", make("p", "", text), ...ideas);
  }

  /** Whether the end of the conversation is in sight: whoever reads further up stays there. */
  isNear() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 80;
  }

  follow(wanted = true) {
    if (wanted) this.log.scrollTop = this.log.scrollHeight;
  }

  /** As high as its text, up to what the style allows. */
  fit() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${this.prompt.scrollHeight + 2}px`;
  }

  keep() {
    for (const field of this.settings) this.kept.settings[field.id] = field.value;
    try {
      localStorage.setItem(KEY, JSON.stringify(this.kept));
    } catch {
      // no room, or not allowed: it lasts as long as the page
    }
  }
}

function read() {
  try {
    const kept = JSON.parse(localStorage.getItem(KEY));
    if (Array.isArray(kept.messages) && kept.settings) return kept;
  } catch {
    // nothing, or nothing that we have written
  }
  return { messages: [], settings: {} };
}

function facts(usage, began, first) {
  const now = performance.now();
  const tokens = usage.completion_tokens;
  const seconds = (now - first) / 1000;
  const cached = usage.prompt_tokens_details?.cached_tokens;
  const words = [`${tokens} token${tokens === 1 ? "" : "s"}`];
  if (first && tokens > 1) {
    words.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
    words.push(`first after ${((first - began) / 1000).toFixed(2)} s`);
  }
  words.push(`prompt ${usage.prompt_tokens}${cached ? `, ${cached} of them cached` : ""}`);
  return words.join(" · ");
}
