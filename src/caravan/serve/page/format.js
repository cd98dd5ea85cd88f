// Numbers for people.

const number = new Intl.NumberFormat("en");

export function count(value) {
  return number.format(value);
}

export function bytes(value) {
  for (const [unit, word] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (value >= unit) return `${(value / unit).toFixed(value < 9.95 * unit ? 1 : 0)} ${word}`;
  }
  return `${value} B`;
}

export function perSecond(value) {
  for (const [unit, word] of [[1e9, "GB/s"], [1e6, "MB/s"], [1e3, "kB/s"]]) {
    if (value >= unit) return `${(value / unit).toFixed(value < 9.95 * unit ? 1 : 0)} ${word}`;
  }
  return `${value} B/s`;
}

export function trip(seconds) {
  const ms = seconds * 1000;
  return `${ms < 10 ? ms.toFixed(2) : ms.toFixed(0)} ms`;
}

export function duration(seconds) {
  return seconds < 10 ? `${Number(seconds.toFixed(1))} s` : `${Math.round(seconds)} s`;
}

export function percent(part) {
  return `${Math.round(100 * part)} %`;
}

/** A part of one as a CSS length. */
export function share(part) {
  return `${Math.min(100, Math.max(0, 100 * part)).toFixed(2)}%`;
}
