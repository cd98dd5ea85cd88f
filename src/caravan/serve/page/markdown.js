// Simple Markdown as elements: what a model writes is only ever text in them, never HTML.

import { copyButton, make } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const RULE = /^ {0,3}([-*_])\s*(\1\s*){2,}$/;
// code, bold, italic, a link: the first that matches, from left to right
const INLINE =
  /(`+)(.+?)\1(?!`)|\*\*(?=\S)(.+?)\*\*|(?<![\w*])\*(?=[^\s*])(.+?)(?<=[^\s*])\*(?![\w*])|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/s;

/** Have an element show a text. What it shows already stays in place: a selection, and for those
    who listen, what they have heard. */
export function show(element, text) {
  const fresh = [...render(text).childNodes];
  const old = [...element.childNodes];
  let same = 0;
  while (same < fresh.length && same < old.length && old[same].isEqualNode(fresh[same])) same += 1;
  for (const node of old.slice(same)) node.remove();
  element.append(...fresh.slice(same));
}

/** A text as elements; an open code block ends with the text. */
function render(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const found = document.createDocumentFragment();
  while (lines.length) found.append(...block(lines));
  return found;
}

/** Takes one block off the lines. */
function block(lines) {
  const line = lines[0];
  if (!line.trim()) {
    lines.shift();
    return [];
  }
  const fence = FENCE.exec(line);
  if (fence) return [code(lines, fence)];
  const heading = HEADING.exec(line);
  if (heading) {
    lines.shift();
    // the page has headings of its own above these
    const level = Math.min(6, heading[1].length + 2);
    return [make(`h${level}`, "", ...inline(heading[2]))];
  }
  if (RULE.test(line)) {
    lines.shift();
    return [make("hr")];
  }
  if (QUOTE.test(line)) return [make("blockquote", "", render(take(lines, QUOTE).join("\n")))];
  if (ITEM.test(line)) return [list(lines)];
  return [paragraph(lines)];
}

/** What is behind the mark, of all lines that have it. */
function take(lines, mark) {
  const taken = [];
  for (let match; lines.length && (match = mark.exec(lines[0])); lines.shift()) {
    taken.push(match[1]);
  }
  return taken;
}

function code(lines, [, mark, language]) {
  lines.shift();
  const inside = [];
  const end = new RegExp(`^ {0,3}\\${mark[0]}{${mark.length},}\\s*$`);
  while (lines.length) {
    const line = lines.shift();
    if (end.test(line)) break;
    inside.push(line);
  }
  const text = inside.join("\n");
  const pre = make("pre", "", make("code", "", text));
  pre.tabIndex = 0;
  const head = make("div", "code-head", make("span", "", language), copyButton(() => text));
  return make("div", "code", head, pre);
}

function list(lines) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const ordered = /\d/.test(mark);
  const found = make(ordered ? "ol" : "ul");
  if (ordered) found.start = parseInt(mark, 10);
  for (let match; lines.length && (match = ITEM.exec(lines[0])); ) {
    if (match[1].length < indent.length || /\d/.test(match[2]) !== ordered) break;
    lines.shift();
    found.append(make("li", "", render([match[3], ...belonging(lines, match)].join("\n"))));
  }
  return found;
}

/** The lines that are further in than an item, without that indentation. */
function belonging(lines, [, indent, mark]) {
  const taken = [];
  while (lines.length) {
    const line = lines[0];
    const next = line.trim() ? line : lines.find((other) => other.trim());
    const inside = next !== undefined && depth(next) >= indent.length + 2;
    // a list goes on after an empty line
    const goesOn = next !== undefined && !line.trim() && ITEM.test(next);
    if (!inside && !goesOn) break;
    taken.push(line.slice(Math.min(depth(line), indent.length + mark.length + 1)));
    lines.shift();
  }
  return taken;
}

function depth(line) {
  return line.length - line.trimStart().length;
}

function paragraph(lines) {
  const taken = [];
  const others = [FENCE, HEADING, QUOTE, RULE, ITEM];
  do taken.push(lines.shift());
  while (lines.length && lines[0].trim() && !others.some((other) => other.test(lines[0])));
  return make("p", "", ...inline(taken.join("\n")));
}

function inline(text) {
  const parts = [];
  for (let match; (match = INLINE.exec(text)); text = text.slice(match.index + match[0].length)) {
    parts.push(text.slice(0, match.index), styled(match));
  }
  parts.push(text);
  return parts;
}

function styled([, , code, bold, italic, label, url]) {
  if (code !== undefined) return make("code", "", code);
  if (bold !== undefined) return make("strong", "", ...inline(bold));
  if (italic !== undefined) return make("em", "", ...inline(italic));
  const link = make("a", "", label);
  link.href = url;
  link.target = "_blank";
  link.rel = "noopener noreferrer";
  return link;
}
