/**
 * Numbers as text: few digits, the unit always visible, a missing value as a dash. Raw values come in the unit that their
 * document names; here they are only scaled for reading (ns to ms, bytes to MiB).
 */

import type { Cell, Place, Unit } from './types';

/** What stands where a value is missing. */
export const MISSING = '–';
const NARROW = '\u202f';

type Value = number | string | boolean | null | undefined;
/** Factor to the smallest unit, its name; ascending. */
type Scale = readonly (readonly [number, string])[];

const TIME: Scale = [[1, 'ns'], [1e3, 'µs'], [1e6, 'ms'], [1e9, 's']];
const BYTES: Scale = [[1, 'B'], [1024, 'KiB'], [1024 ** 2, 'MiB'], [1024 ** 3, 'GiB'], [1024 ** 4, 'TiB']];
/** How many ns one of a unit is. */
const TIMES: Partial<Record<Unit, number>> = { ns: 1, us: 1e3, ms: 1e6, s: 1e9 };
/** Of any unit: less is the end of a float, no measurement. */
const SMALLEST = 0.001;
const SMALLEST_PERCENT = 0.1;
const PLAIN: Partial<Record<Unit, string>> = { per_s: '/s', celsius: '°C', W: 'W', MHz: 'MHz' };

/** A value for reading: `format(1234567, 'ns')` is "1.23 ms". */
export function format(value: Value, unit: Unit): string {
  if (value === null || value === undefined) return MISSING;
  if (typeof value === 'boolean') return value ? 'yes' : 'no';
  if (typeof value === 'string') return value;
  if (!Number.isFinite(value)) return MISSING;
  const time = TIMES[unit];
  if (time !== undefined) return value === 0 ? `0${NARROW}${unitName(unit)}` : duration(value * time);
  if (unit === 'bytes') return scaled(value, BYTES, 1);
  if (unit === 'bytes_per_s') return `${scaled(value, BYTES, 1)}/s`;
  if (unit === 'scalar') return scalar(value);
  if (unit === 'share') return percent(value * 100);
  if (unit === 'pct') return percent(value);
  if (unit === 'count') return count(value);
  const name = PLAIN[unit];
  const text = Number.isInteger(value) ? count(value) : digits(value);
  return name === undefined ? text : `${text}${NARROW}${name}`;
}

/** The value with all its digits, for titles: "1,234,567 ns". A missing value says that it was not measured. */
export function title(value: Value, unit: Unit): string {
  if (value === null || value === undefined) return 'not measured';
  if (typeof value !== 'number') return format(value, unit);
  if (!Number.isFinite(value)) return 'not a number';
  const exact = value.toLocaleString('en-US', { maximumSignificantDigits: 15 });
  return unitName(unit) === '' ? exact : `${exact} ${unitName(unit)}`;
}

/** The unit as it is written behind exact values and in heads of columns; "" where there is none to write. */
export function unitName(unit: Unit): string {
  if (unit === 'us') return 'µs';
  if (unit === 'pct') return '%';
  if (unit === 'share') return '(share of 1)';
  if (unit === 'celsius') return '°C';
  if (unit === 'per_s') return 'per s';
  if (unit === 'bytes_per_s') return 'bytes per s';
  return unit === 'count' || unit === 'number' || unit === 'scalar' || unit === 'text' ? '' : unit;
}

/** A difference, always with its sign: "+1.2 ms", "−3 %". */
export function signed(value: number | null | undefined, unit: Unit): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return MISSING;
  const text = format(Math.abs(value), unit);
  if (value === 0) return text;
  return value > 0 ? `+${text}` : `−${text}`;
}

/** ns for reading; above two minutes as minutes and hours. */
export function duration(ns: number): string {
  const seconds = Math.abs(ns) / 1e9;
  if (seconds < 120) return scaled(ns, TIME, 1);
  const sign = ns < 0 ? '−' : '';
  const whole = Math.round(seconds);
  if (whole < 7200) return `${sign}${Math.floor(whole / 60)}${NARROW}min ${whole % 60}${NARROW}s`;
  const minutes = Math.round(seconds / 60);
  return `${sign}${count(Math.floor(minutes / 60))}${NARROW}h ${minutes % 60}${NARROW}min`;
}

/** A whole number with separators for thousands; of one that is not whole, few digits. */
export function count(value: number): string {
  return Number.isInteger(value) ? minus(value.toLocaleString('en-US')) : digits(value);
}

/** Three digits that count, without zeros at the end; from 1,000 on whole numbers. */
export function digits(value: number): string {
  const size = Math.abs(value);
  if (size >= 999.5) return minus(Math.round(value).toLocaleString('en-US'));
  if (size !== 0 && size < SMALLEST) return `< ${SMALLEST}`;
  return minus(String(Number(value.toPrecision(3))));
}

/** A value of the training's own, which may be small: four digits that count. */
export function scalar(value: number): string {
  const size = Math.abs(value);
  if (size === 0 || (size >= SMALLEST && size < 1e7)) return minus(Number(value.toPrecision(4)).toLocaleString('en-US', { maximumSignificantDigits: 4 }));
  return minus(Number(value.toPrecision(4)).toExponential());
}

function percent(value: number): string {
  const text = value !== 0 && Math.abs(value) < SMALLEST_PERCENT ? `< ${SMALLEST_PERCENT}` : digits(value);
  return `${text}${NARROW}%`;
}

function scaled(value: number, scale: Scale, start: number): string {
  const size = Math.abs(value) * start;
  let [factor, name] = scale[0] ?? [1, ''];
  for (const [next, text] of scale) if (size >= next * 0.9995) [factor, name] = [next, text];
  return `${digits((value * start) / factor)}${NARROW}${name}`;
}

function minus(text: string): string {
  return text.replace(/^-/, '−');
}

export function isPlace(cell: Cell | undefined): cell is Place {
  return typeof cell === 'object' && cell !== null;
}

/** The text of a cell for reading, whatever it is. */
export function cellText(cell: Cell | undefined, unit: Unit): string {
  return isPlace(cell) ? cell.shown : format(cell, unit);
}

/** A date and time of this machine's clock from ns since 1970 (which only dates are made of: they lose ns). */
export function date(ns: number | null): string {
  if (ns === null) return MISSING;
  const day = new Date(ns / 1e6);
  const two = (part: number): string => String(part).padStart(2, '0');
  const days = `${day.getFullYear()}-${two(day.getMonth() + 1)}-${two(day.getDate())}`;
  return `${days} ${two(day.getHours())}:${two(day.getMinutes())}`;
}
