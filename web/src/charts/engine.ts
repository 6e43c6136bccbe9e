/** ECharts with only what the charts use. */

import { BarChart, CustomChart, LineChart, ScatterChart } from 'echarts/charts';
import { GridComponent } from 'echarts/components';
import { init, use, type EChartsType } from 'echarts/core';
import { CanvasRenderer } from 'echarts/renderers';
import type { Option } from './option';

use([BarChart, CustomChart, LineChart, ScatterChart, GridComponent, CanvasRenderer]);

export interface Engine { draw(option: Option, width: number, height: number): void; stop(): void }

export function start(host: HTMLElement): Engine {
  const chart: EChartsType = init(host, null, { renderer: 'canvas' });
  let [drawnWidth, drawnHeight] = [0, 0];
  return {
    draw(option, width, height) {
      if (width !== drawnWidth || height !== drawnHeight) {
        chart.resize({ width, height, silent: true });
        [drawnWidth, drawnHeight] = [width, height];
      }
      chart.setOption(option, { notMerge: true, lazyUpdate: false });
    },
    stop() {
      chart.dispose();
    },
  };
}
