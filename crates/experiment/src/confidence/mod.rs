//! Confidence sequences and e-processes: intervals and evidence that stay valid however often they are looked at.
//!
//! - [`asymptotic`]: for means of many devices (normal mixture; needs a burn-in);
//! - [`betting`]: exact for bounded outcomes of small fleets;
//! - [`binomial`]: exact bounds for rare events, the crash e-process, beta-binomial mixtures;
//! - [`ratio_mismatch`]: sequential test of the sample ratio.

pub mod asymptotic;
pub mod betting;
pub mod binomial;
pub mod ratio_mismatch;
