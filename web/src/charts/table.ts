/** The values behind a chart as a table block, for those who do not see the picture and for CSV. */

import type { Cell, ChartBlock, Column, TableBlock, Unit } from '../lib/types';

export function tableOf(block: ChartBlock): TableBlock {
  const edges = block.type === 'histogram' && block.x.values.length > 1;
  const axis = block.type === 'interval' ? '' : block.x.unit;
  const columns: Column[] = [column('x', edges ? `${block.x.label}, from` : block.x.label || 'Name', axis, isNumeric(block))];
  if (edges) columns.push(column('to', `${block.x.label}, to`, axis, true));
  block.series.forEach((series, at) => {
    columns.push(column(`s${at}`, series.name, series.unit, true));
    if (series.low !== undefined) columns.push(column(`s${at}.low`, `${series.name}, low`, series.unit, true));
    if (series.high !== undefined) columns.push(column(`s${at}.high`, `${series.name}, high`, series.unit, true));
  });
  const rows = rowsOf(block, edges);
  return {
    kind: 'table', id: `chart.${block.id}`, title: `${block.title}: values`, columns, rows, total: rows.length, sorted_by: null,
    notes: [],
  };
}

function rowsOf(block: ChartBlock, edges: boolean): Record<string, Cell>[] {
  const values = block.x.values;
  const longest = block.series.reduce((most, series) => Math.max(most, series.values.length), 0);
  const count = block.series.length > 0 ? Math.min(values.length, longest) : values.length;
  const odd = block.series.map((series) => new Map(series.odd ?? []));
  return values.slice(0, count).map((x, at) => {
    const row: Record<string, Cell> = { x };
    if (edges) row['to'] = upper(values, at);
    block.series.forEach((series, index) => {
      row[`s${index}`] = odd[index]?.get(at) ?? series.values[at] ?? null;
      if (series.low !== undefined) row[`s${index}.low`] = series.low[at] ?? null;
      if (series.high !== undefined) row[`s${index}.high`] = series.high[at] ?? null;
    });
    return row;
  });
}

/** The upper edge of a bin: the next one's lower edge; of the last, as far away as its own neighbour. */
function upper(values: readonly (number | string)[], at: number): number | null {
  const [here, next, before] = [values[at], values[at + 1], values[at - 1]];
  if (typeof here !== 'number') return null;
  if (typeof next === 'number') return next;
  return typeof before === 'number' ? +(2 * here - before).toPrecision(12) : null;
}

function isNumeric(block: ChartBlock): boolean {
  return block.x.values.every((value) => typeof value === 'number');
}

function column(key: string, label: string, unit: Unit, numeric: boolean): Column {
  return { key, label, unit, numeric, help: null };
}
