/** Round ticks and their texts, by unit: powers of two for bytes, minutes and hours for long times. Pure. */

import { duration } from '../lib/format';
import type { Unit } from '../lib/types';
import type { Range } from './shape';

export interface Scale { min: number; max: number; step: number; ticks: number[] }

const NARROW = '\u202f';
const SECONDS = [30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400] as const;
const NS: Partial<Record<Unit, number>> = { ns: 1, us: 1e3, ms: 1e6, s: 1e9 };
const TIME = [[1, 'ns'], [1e3, 'µs'], [1e6, 'ms'], [1e9, 's']] as const;
const BYTES = [[1, 'B'], [1024, 'KiB'], [1024 ** 2, 'MiB'], [1024 ** 3, 'GiB'], [1024 ** 4, 'TiB']] as const;
const SIGNS: Partial<Record<Unit, string>> = { per_s: '/s', celsius: '°C', W: 'W', MHz: 'MHz', pct: '%' };
const LONG_NS = 120e9;
/** Below it numbers are read as powers of ten, as learning rates are. */
const TINY = 1e-3;

/** The smallest scale with about `wanted` round steps that holds low and high. */
export function rounded(low: number, high: number, unit: Unit, wanted: number): Scale {
  const span = high > low ? high - low : Math.abs(high) || 1;
  const step = stepOf(span / wanted, unit);
  const min = Math.floor(low / step + 1e-9) * step;
  const max = Math.max(Math.ceil(high / step - 1e-9) * step, min + step);
  return { min, max, step, ticks: multiples(min, max, step) };
}

/** Round ticks within a range that stays as it is. */
export function within([low, high]: Range, unit: Unit, wanted: number): Scale {
  const step = stepOf((high - low || 1) / wanted, unit);
  return { min: low, max: high, step, ticks: multiples(low, high, step) };
}

/** Texts of the ticks of one axis: all in the same unit, with as many digits as tell them apart. */
export function tickText(scale: Scale, unit: Unit): (value: number) => string {
  const largest = Math.max(Math.abs(scale.min), Math.abs(scale.max));
  const ns = NS[unit];
  if (ns !== undefined && largest * ns >= LONG_NS) return (value) => (value === 0 ? '0' : duration(value * ns));
  const [factor, name] = unitOf(unit, largest);
  const step = scale.step / factor;
  if (name === '' && largest > 0 && largest < TINY) return (value) => (value === 0 ? '0' : value.toExponential(1).replace('.0e', 'e').replaceAll('-', '−'));
  const decimals = Math.min(6, Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
  const digits = Number.isInteger(+(step * 10 ** decimals).toPrecision(6)) ? decimals : decimals + 1;
  return (value) => {
    if (value === 0) return unit === 'share' || unit === 'pct' ? `0${NARROW}%` : '0';
    const text = (value / factor).toLocaleString('en-US', { minimumFractionDigits: digits, maximumFractionDigits: digits });
    return `${text.replace(/^-/, '−')}${name === '' ? '' : NARROW}${name}`;
  };
}

/** Factor and name of the unit in which a number as large as `largest` is read. */
export function unitOf(unit: Unit, largest: number): readonly [factor: number, name: string] {
  const ns = NS[unit];
  if (ns !== undefined) {
    const [factor, name] = last(TIME, largest * ns);
    return [factor / ns, name];
  }
  if (unit === 'bytes') return last(BYTES, largest);
  if (unit === 'bytes_per_s') {
    const [factor, name] = last(BYTES, largest);
    return [factor, `${name}/s`];
  }
  if (unit === 'share') return [0.01, '%'];
  return [1, SIGNS[unit] ?? ''];
}

function last(scale: readonly (readonly [number, string])[], size: number): readonly [number, string] {
  return scale.findLast(([factor]) => size >= factor * 0.9995) ?? scale[0] ?? [1, ''];
}

function stepOf(rough: number, unit: Unit): number {
  if (unit === 'bytes' || unit === 'bytes_per_s') return Math.max(1, 2 ** Math.ceil(Math.log2(rough) - 0.25));
  const ns = NS[unit];
  const seconds = ns === undefined ? 0 : (rough * ns) / 1e9;
  if (ns !== undefined && seconds > 20) {
    const found = SECONDS.find((step) => step >= seconds * 0.8) ?? Math.ceil(seconds / 86_400) * 86_400;
    return (found * 1e9) / ns;
  }
  const power = 10 ** Math.floor(Math.log10(rough));
  const lead = rough / power;
  const step = (lead <= 1.2 ? 1 : lead <= 2.4 ? 2 : lead <= 6 ? 5 : 10) * power;
  return unit === 'count' ? Math.max(1, step) : step;
}

function multiples(low: number, high: number, step: number): number[] {
  const first = Math.ceil(low / step - 1e-9);
  const final = Math.floor(high / step + 1e-9);
  const ticks: number[] = [];
  // from whole numbers, so that 0.1 + 0.2 is not 0.30000000000000004
  for (let at = first; at <= final && ticks.length < 100; at += 1) ticks.push(+(at * step).toPrecision(12));
  return ticks;
}
