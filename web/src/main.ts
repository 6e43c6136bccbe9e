/** Starts the program, with the documents of the page itself where it holds some, else with those of the server. */

import './theme.css';
import { mount } from 'svelte';
import App from './App.svelte';
import { EmbeddedSource, embeddedDocuments, message, ServedSource } from './lib/source';
import { startTheme } from './lib/theme';

async function start(target: HTMLElement): Promise<void> {
  startTheme();
  const embedded = await embeddedDocuments();
  const source = embedded === null ? new ServedSource() : new EmbeddedSource(embedded);
  target.replaceChildren();
  mount(App, { target, props: { source } });
}

const target = document.getElementById('app');
if (target !== null) {
  start(target).catch((error: unknown) => {
    target.textContent = `This report cannot be read: ${message(error)}`;
  });
}
