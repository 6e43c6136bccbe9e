/** Order, filter and folding of the rows of a table. All pure: rows in, rows out. */

import { cellText, isPlace } from './format';
import type { Cell, TableBlock } from './types';

/** What a link restores of a table. `page` counts from 1. */
export interface TableState { sort: string | null; down: boolean; filter: string; page: number }

export interface Row {
  /** Place in the document. */
  index: number;
  cells: Record<string, Cell>;
  depth: number;
  /** Of a tree, in the order shown. */
  children: Row[];
}

export const PAGE_ROWS = 100;

/** "sort:-self_ns;page:2;filter:text"; the filter stands last, so that it may hold any character. */
export function readState(text: string | undefined): TableState {
  const state: TableState = { sort: null, down: false, filter: '', page: 1 };
  let rest = text ?? '';
  while (rest !== '') {
    if (rest.startsWith('filter:')) return { ...state, filter: rest.slice('filter:'.length) };
    const end = rest.indexOf(';');
    const part = end < 0 ? rest : rest.slice(0, end);
    rest = end < 0 ? '' : rest.slice(end + 1);
    if (part.startsWith('sort:')) {
      state.down = part.startsWith('sort:-');
      state.sort = part.slice(state.down ? 6 : 5);
    } else if (part.startsWith('page:')) {
      state.page = Math.max(1, Math.trunc(Number(part.slice(5))) || 1);
    }
  }
  return state;
}

/** Null where nothing differs from how the table comes. */
export function writeState(state: TableState): string | null {
  const parts: string[] = [];
  if (state.sort !== null) parts.push(`sort:${state.down ? '-' : ''}${state.sort}`);
  if (state.page > 1) parts.push(`page:${state.page}`);
  if (state.filter !== '') parts.push(`filter:${state.filter}`);
  return parts.length === 0 ? null : parts.join(';');
}

/** The rows at the top, with those below them. */
export function forest(block: TableBlock): Row[] {
  const top: Row[] = [];
  const path: Row[] = [];
  for (const [index, cells] of block.rows.entries()) {
    const depth = block.tree === true && typeof cells['depth'] === 'number' ? cells['depth'] : 0;
    const row: Row = { index, cells, depth, children: [] };
    while (path.length > 0 && (path[path.length - 1]?.depth ?? 0) >= depth) path.pop();
    (path[path.length - 1]?.children ?? top).push(row);
    path.push(row);
  }
  return top;
}

/** The rows that contain all words of the filter, with what stands above and below them in a tree. */
export function filtered(rows: readonly Row[], block: TableBlock, filter: string): Row[] {
  const words = filter.toLowerCase().split(/\s+/).filter((word) => word !== '');
  if (words.length === 0) return [...rows];
  const keep = (row: Row): Row | null => {
    const text = rowText(row, block);
    if (words.every((word) => text.includes(word))) return row;
    const children = row.children.map(keep).filter((child) => child !== null);
    return children.length > 0 ? { ...row, children } : null;
  };
  return rows.map(keep).filter((row) => row !== null);
}

function rowText(row: Row, block: TableBlock): string {
  return block.columns.map((column) => searchText(row.cells[column.key], column.unit)).join('\n').toLowerCase();
}

function searchText(cell: Cell | undefined, unit: TableBlock['columns'][number]['unit']): string {
  return isPlace(cell) ? `${cell.shown} ${cell.function ?? ''} ${cell.code ?? ''}` : cellText(cell, unit);
}

/** Ordered by a column among siblings; missing values stand last either way. */
export function sorted(rows: readonly Row[], key: string | null, down: boolean): Row[] {
  if (key === null) return [...rows];
  const sign = down ? -1 : 1;
  const order = (one: Row, other: Row): number => compare(one.cells[key], other.cells[key], sign);
  return [...rows].sort(order).map((row) => (
    row.children.length === 0 ? row : { ...row, children: sorted(row.children, key, down) }
  ));
}

function compare(one: Cell | undefined, other: Cell | undefined, sign: number): number {
  const [missing, also] = [one ?? null, other ?? null];
  if (missing === null || also === null) return Number(missing === null) - Number(also === null);
  if (typeof missing === 'number' && typeof also === 'number') return sign * (missing - also);
  return sign * cellText(missing, 'text').localeCompare(cellText(also, 'text'), 'en', { numeric: true });
}

/** All rows in order, parents before children; only below open ones where `isOpen` is given. */
export function flattened(rows: readonly Row[], isOpen: (row: Row) => boolean = () => true): Row[] {
  const result: Row[] = [];
  const add = (row: Row): void => {
    result.push(row);
    if (row.children.length > 0 && isOpen(row)) row.children.forEach(add);
  };
  rows.forEach(add);
  return result;
}

/** The largest absolute value of each column with bars. */
export function largest(block: TableBlock): Record<string, number> {
  const result: Record<string, number> = {};
  for (const column of block.columns) {
    if (column.bar !== true) continue;
    result[column.key] = block.rows.reduce((most, row) => {
      const value = row[column.key];
      return typeof value === 'number' ? Math.max(most, Math.abs(value)) : most;
    }, 0);
  }
  return result;
}
