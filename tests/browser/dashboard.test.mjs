// The dashboard as people see it, on a server after a demo run. Every number is compared with the admin API.
import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';
import {
  api, launch, logIn, loggedIn, number, openContext, rows, sameShare, server, shoot, token, tokenName,
} from './harness.mjs';

let browser;
before(async () => {
  browser = await launch();
});
after(() => browser?.close());

/** Runs `body` in a fresh session and then asks whether anything went wrong on the way. */
async function session(body, options) {
  const { context, page } = await loggedIn(browser, options);
  await body(page, context);
  assert.deepEqual(context.problems, []);
  await context.close();
}

async function everyPath() {
  const rollouts = await api('/v1/rollouts');
  const details = rollouts.map((r) => [`rollout-${r.rollout_id}`, `/rollouts/${r.rollout_id}`]);
  return [['overview', '/'], ['findings', '/findings'], ['audit', '/audit'], ['views', '/views'],
    ['view', '/views/rejection_rate_24h'], ...details];
}

test('a wrong token is refused with a message', async () => {
  const context = await openContext(browser, { expected: [401] });
  const page = await context.newPage();
  await page.goto(`${server}/`);
  assert.equal(new URL(page.url()).pathname, '/login', 'without a token everybody is sent to the login');
  await logIn(page, 'fwt_wrong');
  assert.match(await page.getByRole('alert').innerText(), /unknown, expired or revoked/);
  assert.deepEqual(await context.cookies(), [], 'a refused token is not kept');
  await shoot(page, 'login-refused');
  // what was typed comes back whole, in any script
  await page.getByLabel('Token', { exact: true }).fill('fwt_wrong');
  await page.getByLabel(/^App/).fill('support-x');
  await page.getByRole('button', { name: 'Log in' }).click();
  assert.equal(await page.getByLabel(/^App/).inputValue(), 'support-x');
  assert.deepEqual(context.problems, []);
  await context.close();
});

test('the overview shows bundles with device counts and shares', () =>
  session(async (page, context) => {
    const cookie = (await context.cookies()).find((c) => c.name === 'flywheel_token');
    assert.equal(cookie.value, token);
    for (const link of await page.locator('link[href]').evaluateAll((all) => all.map((l) => l.href))) {
      assert.equal((await fetch(link)).status, 200, link);
    }
    assert.ok(cookie.httpOnly && cookie.sameSite === 'Strict', 'scripts and other sites do not get the token');
    const seen = ['interactions', 'feedback', 'device_events'].map((t) => `SELECT install_id, trust FROM ${t}`);
    const query =
      `SELECT count(DISTINCT install_id) AS n FROM (${seen.join(' UNION ALL ')}) AS seen ` +
      "WHERE install_id IS NOT NULL AND trust <> 'anonymous'";
    const [[counted]] = (await api('/v1/sql', { query })).rows;
    assert.ok(counted > 0, 'the demo has devices');
    assert.equal(number(await page.locator('#devices').innerText()), counted);
    const bundles = await rows(page, '#bundles');
    let [devices, shares] = [0, 0];
    for (const [name, , count, share, silent] of bundles) {
      devices += number(count);
      shares += number(share);
      sameShare(share, number(count) / counted, `share of ${name}`);
      assert.ok(number(silent) <= number(count), `${name}: ${silent} of ${count} not reporting`);
    }
    assert.equal(devices, counted, 'each device runs one bundle');
    assert.ok(Math.abs(shares - 100) < 0.01 * bundles.length, `shares add up to ${shares} %`);
    const rollouts = await api('/v1/rollouts');
    for (const link of await page.locator('#rollouts a').allInnerTexts()) {
      assert.ok(rollouts.some((r) => r.rollout_id === link), link);
    }
    assert.ok((await page.locator('#rollouts a').count()) > 0, 'rollouts can be reached');
  }));

/** `interval` as the page writes it: value, lower, upper, margin. */
function sameInterval(cell, gate, what) {
  if (gate?.difference === null || gate?.difference === undefined) {
    assert.equal(cell, '–', what);
    return;
  }
  const said = /^(\S+ pp), range (\S+(?: pp)?) to (\S+(?: pp)?); allowed (\S+(?: pp)?)$/.exec(cell);
  assert.ok(said, `${what}: ${cell}`);
  ['difference', 'lower', 'upper', 'margin'].forEach((field, i) =>
    sameShare(said[i + 1], gate[field], `${what}: ${field}`),
  );
}

function sameGate(cells, gate, what) {
  sameInterval(cells[2], gate, what);
  sameShare(cells[3], gate.treatment_value, `${what}: new`);
  sameShare(cells[4], gate.control_value, `${what}: last good`);
  assert.deepEqual(cells[5].split(' / ').map(number), [gate.treatment_devices, gate.control_devices], what);
  assert.deepEqual(cells[6].split(' / ').map(number), [gate.treatment_events, gate.control_events], what);
}

test('a rollout shows each step with its interval, as the API has them', async (t) => {
  const second = (text) => Math.floor(Date.parse(text) / 1000);
  let intervals = 0;
  await session(async (page) => {
    for (const { rollout_id: id } of await api('/v1/rollouts')) {
      const { plans, verdicts } = await api(`/v1/rollouts/${id}`);
      await page.goto(`${server}/rollouts/${id}`);
      const reports = verdicts.filter((v) => v.gate === 'all');
      const newest = reports.at(-1)?.numbers;
      const gates = await rows(page, '#gates');
      assert.equal(gates.length, newest?.gates.length ?? 0, `${id}: every gate has a row`);
      gates.forEach((cells, i) => sameGate(cells, newest.gates[i], `${id} ${newest.gates[i].name}`));
      const steps = await rows(page, '#plans');
      assert.deepEqual(steps.map((cells) => number(cells[0])), plans.map((p) => p.generation).reverse(), id);
      steps.forEach((cells, i) => {
        const plan = plans.at(-1 - i);
        const what = `${id} plan ${plan.generation}`;
        assert.equal(number(cells[3]), plan.step, what);
        sameShare(cells[4], (plan.treatment.to - plan.treatment.from) / 1e6, what);
        sameShare(cells[5], (plan.control.to - plan.control.from) / 1e6, what);
        const look = reports.findLast((v) => second(v.at) === second(plan.changed_at));
        assert.equal(cells[6] === '–', !look, `${what}: ${cells[6]}`);
        sameInterval(cells[7], look?.numbers.gates.find((g) => g.kind === 'rejection'), what);
      });
      // each interval is drawn too, and its picture says the numbers to who cannot see it
      const drawn = await page.locator('svg.interval title').allTextContents();
      for (const title of drawn) assert.match(title, /difference \S+ pp, interval .+ margin \S+ pp$/);
      intervals += drawn.length;
    }
  });
  t.diagnostic(intervals ? `${intervals} intervals compared` : 'no rollout of this run was compared with another');
});

test('the frozen chunk is among the suspected causes with its evidence', () =>
  session(async (page) => {
    const audit = await api('/v1/audit?limit=1000');
    const frozen = audit.filter((e) => e.action === 'chunk.state' && /^(canary_)?frozen$/.test(e.detail.to));
    assert.ok(frozen.length > 0, 'the demo froze a chunk');
    const findings = await api('/v1/findings');
    await page.goto(`${server}/findings`);
    for (const entry of frozen) {
      const finding = findings.find((f) => f.finding_id === entry.detail.finding);
      const { suspect } = finding.evidence;
      const card = page.locator(`[id="${finding.finding_id}"]`);
      assert.equal(await card.locator('h2').innerText(), `chunk ${entry.subject} version ${entry.detail.version}`);
      if (finding.state === 'acted') assert.ok(await card.locator('table').isVisible(), 'what is in force is unfolded');
      const facts = Object.fromEntries(await card.locator('tr').evaluateAll((trs) =>
        // a folded table has no inner text
        trs.map((tr) => [...tr.children].map((c) => c.textContent.trim()))));
      const failed = facts['Failed answers with it'].split(' of ').map(number);
      assert.deepEqual(failed, [suspect.failures, suspect.exposures]);
      assert.equal(number(facts['People counted']), suspect.users);
      sameShare(facts['Likely cause of a failure when it comes first'], suspect.q_hat, 'likely cause');
    }
  }));

test('the audit log is whole, and shows a name in Chinese', (t) =>
  session(async (page) => {
    await page.goto(`${server}/audit`);
    const entries = await rows(page, '#entries');
    const wanted = await api(`/v1/audit?limit=${entries.length}`);
    assert.deepEqual(entries.map((e) => number(e[0])), wanted.map((e) => e.seq));
    assert.deepEqual(entries.map((e) => e[3]), wanted.map((e) => e.action));
    await page.getByRole('link', { name: 'Check that nobody changed it' }).click();
    const { entries: all } = await api('/v1/audit/verify');
    assert.match(await page.getByRole('status').innerText(), new RegExp(`^All ${all} entries fit together`));
    if (!tokenName) return t.diagnostic('FLYWHEEL_TOKEN_NAME is not set: no name was looked for');
    const made = page.locator('#entries tr', { hasText: 'token.create' }).filter({ hasText: tokenName });
    assert.ok((await made.count()) > 0, `the page shows ${tokenName}`);
    assert.ok((await glyphs(page, made.locator('code').first())) > 0, 'a font draws the name');
  }));

/** Glyphs that real fonts drew for an element, by the engine's own count. */
async function glyphs(page, locator) {
  await locator.evaluate((e) => e.setAttribute('id', 'measured'));
  const cdp = await page.context().newCDPSession(page);
  await cdp.send('DOM.enable');
  await cdp.send('CSS.enable');
  const { root } = await cdp.send('DOM.getDocument');
  const { nodeId } = await cdp.send('DOM.querySelector', { nodeId: root.nodeId, selector: '#measured' });
  const { fonts } = await cdp.send('CSS.getPlatformFontsForNode', { nodeId });
  return fonts.reduce((n, f) => n + f.glyphCount, 0);
}

for (const [width, colorScheme] of [[360, 'light'], [1280, 'light'], [1280, 'dark']]) {
  test(`no page scrolls sideways at ${width} px (${colorScheme})`, () =>
    session(async (page) => {
      for (const [name, path] of [...(await everyPath()), ['login', '/login']]) {
        await page.goto(server + path);
        await shoot(page, `${name}-${width}-${colorScheme}`);
        const [needs, has] = await page.evaluate(() => [document.documentElement.scrollWidth, innerWidth]);
        assert.ok(needs <= has, `${path} is ${needs} px wide at ${has} px`);
        // heads of tables are there for screen readers only where each cell says its column
        const cut = await page.locator('main *:not(thead, thead *)').evaluateAll((all) =>
          all.filter((e) => e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 80)));
        assert.deepEqual(cut, [], `${path}: out of the window at ${width} px`);
      }
    }, { width, colorScheme }));
}

test('the keyboard reaches everything, and the focus can be seen', () =>
  session(async (page) => {
    for (const [, path] of await everyPath()) {
      await page.goto(server + path);
      const reachable = await page.locator('a[href], button, input, summary').count();
      for (let i = 0; i < reachable; i += 1) {
        await page.keyboard.press('Tab');
        const { order, style, width, shown } = await page.evaluate(() => {
          const e = document.activeElement;
          const [s, box] = [getComputedStyle(e), e.getBoundingClientRect()];
          const order = [...document.querySelectorAll('a[href], button, input, summary')].indexOf(e);
          return { order, style: s.outlineStyle, width: parseFloat(s.outlineWidth), shown: box.right > 0 };
        });
        assert.equal(order, i, `${path}: the order of the keyboard is that of the page`);
        assert.ok(style !== 'none' && width >= 2 && shown, `${path}: element ${i} has the focus and does not show it`);
      }
    }
  }));

test('the logout ends the session', () =>
  session(async (page, context) => {
    await page.getByRole('button', { name: 'Log out' }).click();
    await page.waitForURL(`${server}/login`);
    assert.deepEqual((await context.cookies()).filter((c) => c.name === 'flywheel_token'), []);
    await page.goto(`${server}/audit`);
    assert.equal(new URL(page.url()).pathname, '/login');
  }));
