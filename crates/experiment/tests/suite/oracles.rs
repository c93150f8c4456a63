//! Reference values of public implementations, frozen in `tests/data/oracles.json`.

use crate::support::{at, device, phase};
use flywheel_experiment::confidence::binomial::{
    ln_beta_binomial_mixture, ln_e_more_failures, lower_bound, mixture_interval, upper_bound,
};
use flywheel_experiment::gate::{GateSpecV1, Method, evaluate};
use flywheel_experiment::window::{DeviceRecord, Windows};
use flywheel_types::Verdict;
use flywheel_types::assign::Arm;
use serde_json::Value;

fn table(group: &str) -> Vec<Value> {
    let all: Value = serde_json::from_str(include_str!("../data/oracles.json")).unwrap();
    all[group].as_array().unwrap().clone()
}

fn close(got: f64, want: f64, tol: f64, what: &str) {
    assert!((got - want).abs() <= tol, "{what}: {got} is not {want}");
}

#[test]
fn crash_e_process_matches_the_references() {
    let f = |v: &Value, i: usize| v[i].as_f64().unwrap();
    for v in table("crash") {
        let got = ln_e_more_failures(v[0].as_u64().unwrap(), v[1].as_u64().unwrap(), f(&v, 2), f(&v, 3), f(&v, 4));
        close(got, f(&v, 5), 1e-8, &v.to_string());
    }
    // Margin 0, equal arms, k = 2.
    for (t, n, e) in [(5, 5, 10.5), (7, 7, 31.875), (10, 10, 186.090_909), (15, 20, 6.3555)] {
        close(ln_e_more_failures(t, n, 0.5, 0.0, 2.0).exp(), e, 1e-4 * e, "k = 2");
    }
}

#[test]
fn beta_binomial_mixture_matches_confseq() {
    let f = |v: &Value, i: usize| v[i].as_f64().unwrap();
    for v in table("mixture") {
        let one_sided = v[6].as_bool().unwrap();
        let got = ln_beta_binomial_mixture(f(&v, 0), f(&v, 1), f(&v, 2), f(&v, 3), f(&v, 4), f(&v, 5), one_sided);
        close(got, f(&v, 7), 1e-9, &v.to_string());
    }
    for v in table("bernoulli") {
        let (low, high) = mixture_interval(v[0].as_u64().unwrap(), v[1].as_u64().unwrap(), f(&v, 2), f(&v, 3));
        close(low, f(&v, 4), 1e-6, &v.to_string());
        close(high, f(&v, 5), 1e-6, &v.to_string());
    }
}

#[test]
fn one_sided_bounds_hold_their_level_and_tighten() {
    // No event in 200 devices: sharper than the two-sided mixture, never sharper than the fixed-sample bound.
    let u = upper_bound(0, 200, 0.05);
    assert!(u < mixture_interval(0, 200, 0.05, 200.0).1, "{u}");
    assert!(u > 1.0 - 0.05_f64.powf(1.0 / 200.0), "{u}");
    assert!(upper_bound(0, 2000, 0.05) < 0.1 * 1.3 * u);
    close(lower_bound(1800, 2000, 0.01), 1.0 - upper_bound(200, 2000, 0.01), 1e-9, "mirror");
    assert_eq!((lower_bound(0, 0, 0.05), upper_bound(0, 0, 0.05)), (0.0, 1.0));
    assert_eq!(lower_bound(0, 500, 0.05), 0.0);
}

#[test]
fn rejection_gate_matches_the_references() {
    let all: Value = serde_json::from_str(include_str!("../data/oracles.json")).unwrap();
    let column = |name: &str| -> Vec<u32> {
        let values = all["ratio_data"][name].as_array().unwrap();
        values.iter().map(|x| x.as_u64().unwrap() as u32).collect()
    };
    let (sc, nc, st, nt) = (column("SC"), column("NC"), column("ST"), column("NT"));
    for row in table("gate") {
        let n = row[0].as_u64().unwrap() as usize;
        let mut closed: Vec<DeviceRecord> = Vec::new();
        for i in 0..n {
            closed.push(device(i, Arm::Control, 1, sc[i], nc[i]));
            closed.push(device(i, Arm::Treatment, 1, st[i], nt[i]));
        }
        let windows = Windows { closed, ..Windows::default() };
        for (margin, want) in [(0.01, &row[4]), (0.10, &row[5])] {
            let mut spec = GateSpecV1 { alpha_fail: 0.03, exact_share: 0.0, ..GateSpecV1::default() };
            assert_eq!(spec.fail_tests(), 3, "0.03 / 3 is the reference level 0.01");
            spec.rejection.margin = margin;
            spec.burn_in.devices_per_arm = 2;
            let report = evaluate(&spec, &[phase(1, 100_000, 100_000)], &windows, None, at(200)).unwrap();
            let g = report.gate("rejection_rate").unwrap();
            assert_eq!(g.method, Method::Asymptotic);
            close(g.difference.unwrap(), row[1].as_f64().unwrap(), 1e-12, "estimate");
            close(g.lower.unwrap(), row[2].as_f64().unwrap(), 1e-7, "lower");
            close(g.upper.unwrap(), row[3].as_f64().unwrap(), 1e-7, "upper");
            let got = if g.verdict == Verdict::Warn { Verdict::Continue } else { g.verdict };
            assert_eq!(got.as_str(), want.as_str().unwrap(), "n {n}, margin {margin}");
        }
    }
}
