//! Whole repositories against whole devices: normal life, the attacks TUF names, public bugs of other updaters,
//! damaged local files, and publications that are cut off.

#![expect(clippy::unwrap_used, reason = "a test ends with its first surprise; helpers outside `#[test]` functions too")]

mod attacks;
mod bundles;
mod golden;
mod life;
mod publishing;
mod support;
