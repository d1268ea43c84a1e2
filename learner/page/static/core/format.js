// Numbers, durations and sizes as a reader wants them. Figures that are absent are shown as a dash.
const DASH = "–";
const whole = new Intl.NumberFormat("en-GB", { maximumFractionDigits: 0 });

export function count(value) {
  return value === null || value === undefined ? DASH : whole.format(value);
}

// 1,234 as 1.2k where room is scarce.
export function short(value) {
  if (value === null || value === undefined) return DASH;
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(1)}G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  return figure(value);
}

// Four significant digits; small and large ones with an exponent.
export function figure(value) {
  if (value === null || value === undefined) return DASH;
  if (!Number.isFinite(value)) return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e7 || size < 1e-3) return value.toExponential(2);
  if (Number.isInteger(value)) return whole.format(value);
  return size >= 1000 ? whole.format(value) : Number(value.toPrecision(4)).toString();
}

export function score(value) {
  if (value === null || value === undefined) return DASH;
  return Number.isInteger(value) ? String(value) : value.toFixed(3);
}

export function share(value) {
  if (value === null || value === undefined) return DASH;
  const percent = value * 100;
  return `${percent > 0 && percent < 10 ? percent.toFixed(1) : Math.round(percent)} %`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return DASH;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

export function clock(epochSeconds) {
  if (epochSeconds === null || epochSeconds === undefined) return DASH;
  return new Date(epochSeconds * 1000).toLocaleTimeString("en-GB");
}

export function plural(n, one, many = `${one}s`) {
  return `${count(n)} ${n === 1 ? one : many}`;
}
