/**
 * A chart block as an option of ECharts. ECharts draws; it neither stacks, zooms nor shows tooltips here, because all
 * of that must work by keyboard and without inline styles: see ChartPlot.svelte.
 */

import type { BarSeriesOption, CustomSeriesOption, LineSeriesOption, ScatterSeriesOption } from 'echarts/charts';
import type { GridComponentOption } from 'echarts/components';
import type { ComposeOption } from 'echarts/core';
import type { Look, Theme } from '../lib/colours';
import type { ChartBlock } from '../lib/types';
import { shortened } from '../lib/labels';
import { LETTER, type Geometry } from './geometry';
import type { Ink } from './ink';
import type { Scale } from './scale';
import { tickText, within } from './scale';
import { seriesOf } from './series';
import type { Range, Shape } from './shape';

export type Drawing = BarSeriesOption | LineSeriesOption | ScatterSeriesOption | CustomSeriesOption;
export type Option = ComposeOption<Drawing | GridComponentOption>;

/** All that decides how a block looks at the moment. */
export interface View {
  block: ChartBlock; shape: Shape; geometry: Geometry;
  /** Part of x that is shown. */
  shown: Range;
  values: Scale; looks: readonly Look[]; hidden: ReadonlySet<number>; theme: Theme; ink: Ink;
}

const TICK_PX = 90;
const NAME_PX = 60;
const FONT_SIZE = 11.5;

export function optionOf(view: View): Option {
  const { geometry, shape, ink } = view;
  const { left, right, top, bottom } = geometry;
  const named = shape.numeric ? numberAxis(view) : nameAxis(view);
  const measured = shape.drawn === 'heat' ? nameAxis(view) : valueAxis(view);
  return {
    animation: false,
    textStyle: { fontFamily: ink.font },
    grid: { left, right, top, bottom, outerBoundsMode: 'none' },
    xAxis: shape.lying ? measured : named,
    yAxis: shape.lying ? named : measured,
    series: seriesOf(view),
  } as Option;
}

function label(ink: Ink): object {
  return { color: ink.muted, fontSize: FONT_SIZE, fontFamily: ink.font, hideOverlap: true };
}

function valueAxis({ block, shape, values, ink, geometry }: View): object {
  const plain = tickText(values, block.y.unit);
  const text = shape.drawn === 'interval' && values.min < 0 ? (value: number) => `${value > 0 ? '+' : ''}${plain(value)}` : plain;
  return {
    type: 'value', min: values.min, max: values.max, containShape: false,
    axisLine: { show: false },
    axisTick: { show: false, customValues: values.ticks },
    axisLabel: { ...label(ink), customValues: values.ticks, formatter: text, ...(shape.lying ? {} : { width: geometry.left - 10 }) },
    splitLine: { lineStyle: { color: ink.border, width: 1, type: 'solid' } },
    interval: values.step,
  };
}

function numberAxis({ block, shown, ink, geometry }: View): object {
  const wanted = Math.max(2, Math.floor((geometry.width - geometry.left - geometry.right) / TICK_PX));
  const unit = block.select === 'steps' ? 'count' : block.x.unit;
  const scale = within(shown, unit, wanted);
  return {
    type: 'value', min: shown[0], max: shown[1], containShape: false,
    axisLine: { show: true, onZero: false, lineStyle: { color: ink.strong } },
    axisTick: { show: true, customValues: scale.ticks, lineStyle: { color: ink.strong } },
    axisLabel: { ...label(ink), customValues: scale.ticks, formatter: tickText(scale, unit) },
    splitLine: { show: false },
    interval: scale.step,
  };
}

function nameAxis({ shape, ink, geometry }: View): object {
  const below = shape.lying || shape.drawn === 'heat';
  const room = below ? geometry.left - 12 : Math.max(NAME_PX, (geometry.width - geometry.left) / Math.max(shape.names.length, 1) - 6);
  const labels = shortened(shape.names, room / LETTER);
  return {
    type: 'category', data: shape.names.map((name) => labels.get(name) ?? name), inverse: below,
    axisLine: { show: true, onZero: false, lineStyle: { color: ink.strong } },
    axisTick: { show: false },
    axisLabel: {
      ...label(ink), ...(below ? { color: ink.text, interval: 0 } : {}),
      width: room, overflow: 'truncate', ellipsis: '…',
    },
    splitLine: { show: false },
  };
}
