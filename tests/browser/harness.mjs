// A Chromium of the system against a running server, and what every page must keep: no console error, no failing
// request, no other host. Settings come from the environment (README.md).
import assert from 'node:assert/strict';
import { mkdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { chromium } from 'playwright-core';

function need(name) {
  const value = process.env[name];
  assert.ok(value, `set ${name}: see tests/browser/README.md`);
  return value;
}

export const server = need('FLYWHEEL_SERVER').replace(/\/+$/, '');
export const token = readFileSync(need('FLYWHEEL_TOKEN_FILE'), 'utf8').trim();
/** Name of the token, as the audit log shows it; unknown when the variable is not set. */
export const tokenName = process.env.FLYWHEEL_TOKEN_NAME;
const screenshots = process.env.FLYWHEEL_SCREENSHOTS;

/** The admin API with the same token: the truth that the pages are compared with. */
export async function api(path, body) {
  const response = await fetch(server + path, {
    method: body ? 'POST' : 'GET',
    headers: { authorization: `Bearer ${token}`, 'content-type': 'application/json' },
    body: body && JSON.stringify(body),
  });
  assert.equal(response.status, 200, `${path}: ${response.status}`);
  return response.json();
}

export function launch() {
  // the sandbox of Chromium does not start for root, which is who runs containers of CI
  const args = process.getuid?.() === 0 ? ['--no-sandbox'] : [];
  return chromium.launch({ executablePath: need('FLYWHEEL_CHROMIUM'), args });
}

/** Notes on `context.problems` whatever a page must not do. `expected` answers of documents are let through. */
export async function openContext(browser, { width = 1280, expected = [], ...options } = {}) {
  const context = await browser.newContext({ viewport: { width, height: 800 }, ...options });
  const problems = [];
  context.on('request', (r) => {
    if (new URL(r.url()).origin !== new URL(server).origin) problems.push(`request to another host: ${r.url()}`);
  });
  context.on('requestfailed', (r) => {
    // a page that is left while its icon loads gives that request up: the server did nothing wrong
    if (r.failure()?.errorText !== 'net::ERR_ABORTED') problems.push(`request failed: ${r.url()}: ${r.failure()?.errorText}`);
  });
  context.on('response', (r) => {
    if (r.status() >= 400 && !expected.includes(r.status())) problems.push(`${r.status()} for ${r.url()}`);
  });
  context.on('console', (m) => {
    const known = expected.some((status) => m.text().includes(`status of ${status}`));
    if (['error', 'warning'].includes(m.type()) && !known) problems.push(`console: ${m.text()}`);
  });
  context.on('weberror', (e) => problems.push(`script error: ${e.error()}`));
  context.problems = problems;
  return context;
}

export async function logIn(page, value = token) {
  await page.goto(`${server}/login`);
  await page.getByLabel('Token', { exact: true }).fill(value);
  await page.getByRole('button', { name: 'Log in' }).click();
}

export async function loggedIn(browser, options) {
  const context = await openContext(browser, options);
  const page = await context.newPage();
  await logIn(page);
  await page.waitForURL(`${server}/`);
  return { context, page };
}

export async function shoot(page, name) {
  if (!screenshots) return;
  mkdirSync(screenshots, { recursive: true });
  await page.screenshot({ path: join(screenshots, `${name}.png`), fullPage: true });
}

/** Rows of a table as arrays of cell texts. */
export async function rows(page, selector) {
  return page.locator(`${selector} tbody tr`).evaluateAll((trs) =>
    trs.map((tr) => [...tr.children].map((td) => td.innerText.trim())),
  );
}

/** The number in a text as people read it: `1,234`, `12.50 %`, `-0.31 pp`. */
export function number(text) {
  const found = /[-+]?[\d,]*\.?\d+/.exec(text);
  assert.ok(found, `no number in ${JSON.stringify(text)}`);
  return Number(found[0].replaceAll(',', ''));
}

/** A shown share or difference equals the API's, up to the two digits that are shown. */
export function sameShare(shown, share, what) {
  if (share === null || share === undefined) {
    assert.match(shown, /^–$/, what);
  } else {
    assert.ok(Math.abs(number(shown) - share * 100) <= 0.005 + 1e-9, `${what}: page says ${shown}, API ${share}`);
  }
}
