/** Tables as CSV (RFC 4180) with raw values: units stand in the head, missing is empty. */

import { unitName, isPlace } from './format';
import type { Cell, Unit } from './types';

export interface CsvColumn { key: string; label: string; unit: Unit }

export function toCsv(columns: readonly CsvColumn[], rows: readonly Record<string, Cell>[]): string {
  const lines = [columns.map((column) => quoted(head(column)))];
  for (const row of rows) lines.push(columns.map((column) => cellOf(row[column.key])));
  return lines.map((line) => `${line.join(',')}\r\n`).join('');
}

/** Hands a text over as a file; nothing leaves the page. */
export function download(name: string, text: string, type = 'text/csv'): void {
  downloadBlob(name, new Blob([text], { type: `${type};charset=utf-8` }));
}

export function downloadBlob(name: string, blob: Blob): void {
  const address = URL.createObjectURL(blob);
  const link = document.createElement('a');
  link.href = address;
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** A title as the name of a file: "Slow steps" is "slow-steps". */
export function fileName(text: string, ending: string): string {
  const stem = text.toLowerCase().replace(/[^a-z0-9]+/g, '-').replace(/^-|-$/g, '');
  return `${stem === '' ? 'table' : stem}.${ending}`;
}

function head(column: CsvColumn): string {
  const unit = unitName(column.unit).replace('(share of 1)', 'share of 1');
  return unit === '' ? column.label : `${column.label} [${unit}]`;
}

function cellOf(cell: Cell | undefined): string {
  if (cell === null || cell === undefined) return '';
  if (typeof cell === 'number') return String(cell);
  return quoted(isPlace(cell) ? cell.shown : String(cell));
}

/** Quotes where needed; a text that a spreadsheet would run as a formula is kept a text by an apostrophe. */
function quoted(text: string): string {
  const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}
