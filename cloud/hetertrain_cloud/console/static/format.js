// How numbers, sizes and times are written: in the viewer's own language and zone, units spelled out.

const UNITS = ["bytes", "kB", "MB", "GB", "TB", "PB"];
const locale = navigator.language || "en";
const whole = new Intl.NumberFormat(locale, { maximumFractionDigits: 0 });
const fine = new Intl.NumberFormat(locale, { maximumSignificantDigits: 4 });
const short = new Intl.NumberFormat(locale, { maximumSignificantDigits: 3 });
const relative = new Intl.RelativeTimeFormat(locale, { numeric: "auto" });
const full = new Intl.DateTimeFormat(locale, { dateStyle: "medium", timeStyle: "long" });
const day = new Intl.DateTimeFormat(locale, { dateStyle: "medium", timeStyle: "short" });

export function number(value) {
  if (value === null || value === undefined) return "–";
  return Number.isInteger(value) ? whole.format(value) : fine.format(value);
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  let unit = 0;
  while (Math.abs(value) >= 1000 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit ? short.format(value) : whole.format(value)} ${UNITS[unit]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  const steps = [[172800, 86400, "days"], [7200, 3600, "hours"], [120, 60, "minutes"]];
  const [, size, unit] = steps.find(([least]) => Math.abs(value) >= least) || [0, 1, "seconds"];
  return `${short.format(value / size)} ${unit}`;
}

export function ago(at, now = Date.now()) {
  const seconds = (at.getTime() - now) / 1000;
  const steps = [[60, "second", 1], [3600, "minute", 60], [86400, "hour", 3600], [30 * 86400, "day", 86400]];
  for (const [below, unit, size] of steps) {
    if (Math.abs(seconds) < below) return relative.format(Math.round(seconds / size), unit);
  }
  return day.format(at);
}

export function moment(at) {
  return day.format(at);
}

export function exact(at) {
  return full.format(at);
}

// A text as children of an element: a long dotted name may be broken behind each dot in it.
export function breakable(text) {
  return String(text)
    .split(/(?<=[\p{L}\p{N}]\.)(?=\p{L})/u)
    .flatMap((part, index) => (index ? [Vue.h("wbr"), part] : [part]));
}
