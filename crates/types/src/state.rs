//! Enumerated states and their legal transitions. The tables in ARCHITECTURE.md are made from these functions.

use serde::{Deserialize, Serialize};

macro_rules! state_enum {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $var:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum $name { $($(#[$vdoc])* #[serde(rename = $text)] $var),+ }
        impl $name {
            /// Every value, in declaration order.
            pub const ALL: &'static [Self] = &[$(Self::$var),+];
            /// The word used in storage, on the wire and in logs.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$var => $text),+ }
            }
        }
        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }
        impl std::str::FromStr for $name {
            type Err = UnknownWord;
            fn from_str(s: &str) -> Result<Self, UnknownWord> {
                match s { $($text => Ok(Self::$var),)+ _ => Err(UnknownWord(stringify!($name), s.to_owned())) }
            }
        }
    };
}

/// A word that is not a value of the named enumeration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{1}` is not a {0}")]
pub struct UnknownWord(pub &'static str, pub String);

state_enum! {
    /// What became of a chunk version (DESIGN: ACTIVE → … → ACTIVE(v+1) | RETIRED).
    ChunkState {
        Active = "active",
        Suspect = "suspect",
        CanaryFrozen = "canary_frozen",
        Frozen = "frozen",
        ReembedQueued = "reembed_queued",
        Shadow = "shadow",
        CanaryActive = "canary_active",
        Retired = "retired",
    }
}

impl ChunkState {
    /// Whether `self → next` is a legal step.
    #[must_use]
    pub fn can_become(self, next: Self) -> bool {
        use ChunkState as S;
        matches!(
            (self, next),
            (S::Active, S::Suspect)
                | (S::Suspect, S::Active | S::CanaryFrozen | S::Frozen)
                | (S::CanaryFrozen, S::Frozen | S::Active | S::ReembedQueued)
                | (S::Frozen, S::ReembedQueued | S::CanaryActive | S::Retired)
                | (S::ReembedQueued, S::Shadow | S::Frozen)
                | (S::Shadow, S::CanaryActive | S::Frozen)
                | (S::CanaryActive, S::Active | S::Frozen)
                | (S::Active | S::Suspect | S::CanaryFrozen, S::Retired)
        )
    }
}

state_enum! {
    /// State of a rollout.
    RolloutState {
        Draft = "draft",
        AwaitingApproval = "awaiting_approval",
        Signed = "signed",
        Ring = "ring",
        Canary = "canary",
        Ramping = "ramping",
        Holding = "holding",
        Paused = "paused",
        RollingBack = "rolling_back",
        RolledBack = "rolled_back",
        Complete = "complete",
        Superseded = "superseded",
    }
}

impl RolloutState {
    /// No further transition is possible.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, Self::RolledBack | Self::Complete | Self::Superseded)
    }
    /// Whether `self → next` is a legal step. Rolling back is always allowed once devices may hold the bundle.
    #[must_use]
    pub fn can_become(self, next: Self) -> bool {
        use RolloutState as S;
        matches!(
            (self, next),
            (S::Draft, S::AwaitingApproval | S::Signed | S::Superseded)
                | (S::AwaitingApproval, S::Signed | S::Superseded)
                | (S::Signed, S::Ring | S::Canary | S::Superseded)
                | (S::Ring, S::Canary | S::Holding | S::Paused | S::RollingBack)
                | (S::Canary, S::Ramping | S::Complete | S::Holding | S::Paused | S::RollingBack)
                | (S::Ramping, S::Ramping | S::Complete | S::Holding | S::Paused | S::RollingBack)
                | (S::Holding | S::Paused, S::Ring | S::Canary | S::Ramping | S::RollingBack | S::Paused | S::Holding)
                | (S::RollingBack, S::RolledBack)
                | (S::Complete, S::RollingBack | S::Superseded)
        )
    }
}

state_enum! {
    /// State of a job.
    JobState {
        Queued = "queued",
        Running = "running",
        Succeeded = "succeeded",
        Cancelled = "cancelled",
        Dead = "dead",
        /// A schedule slot that was not run; the reason stands in `last_error`.
        Skipped = "skipped",
    }
}

state_enum! {
    /// State of a candidate.
    CandidateState {
        Registered = "registered",
        Evaluating = "evaluating",
        GatePassed = "gate_passed",
        GateFailed = "gate_failed",
        /// Past a failed gate by an audited human override.
        Overridden = "overridden",
        SigningRequested = "signing_requested",
        Released = "released",
        Refused = "refused",
    }
}

impl CandidateState {
    #[must_use]
    pub fn can_become(self, next: Self) -> bool {
        use CandidateState as S;
        matches!(
            (self, next),
            (S::Registered, S::Evaluating)
                | (S::Evaluating, S::GatePassed | S::GateFailed)
                | (S::GateFailed, S::Overridden | S::Evaluating)
                | (S::GatePassed | S::Overridden, S::SigningRequested)
                | (S::SigningRequested, S::Released | S::Refused)
        )
    }
}

state_enum! {
    /// Verdict of one gate or of a gate set. Only `Pass` promotes by itself; missing data is never success.
    Verdict {
        Invalid = "INVALID",
        Fail = "FAIL",
        Pass = "PASS",
        Warn = "WARN",
        Continue = "CONTINUE",
        Inconclusive = "INCONCLUSIVE",
    }
}

state_enum! {
    /// How far the sender of a row is known.
    TrustClass {
        /// Platform attestation checked.
        Attested = "attested",
        /// Batch signed by the install key.
        Keyed = "keyed",
        /// Plain OTLP or unsigned.
        Anonymous = "anonymous",
    }
}

state_enum! {
    /// What people or detectors said about an interaction. Unrated is the absence of a label.
    LabelKind {
        Accepted = "accepted",
        Rejected = "rejected",
        Edited = "edited",
        Corrected = "corrected",
        Reported = "reported",
        Refused = "refused",
        Abstained = "abstained",
    }
}

impl LabelKind {
    /// Whether the label counts as a failure of the answer (a person said no).
    #[must_use]
    pub fn is_rejection(self) -> bool {
        matches!(self, Self::Rejected | Self::Edited | Self::Corrected | Self::Reported)
    }
}

state_enum! {
    /// How much the controller may do by itself, per app.
    Automation { Observe = "observe", Recommend = "recommend", Act = "act" }
}
state_enum! {
    /// How many people must approve a rollout, per app.
    Approval { Auto = "auto", One = "one", Two = "two" }
}
state_enum! {
    /// Who decides a device's arm.
    AssignmentSource { Own = "own", External = "external" }
}
state_enum! {
    /// Role of an API token; the order is ascending power except that annotators are a branch of their own.
    Role {
        Viewer = "viewer",
        Annotator = "annotator",
        Operator = "operator",
        Approver = "approver",
        /// The release signer's pull token: sees what waits for a signature, and nothing else.
        Signer = "signer",
        Admin = "admin",
    }
}

impl Role {
    /// Whether a token of this role may do what `needed` may do. Admin may do everything; approver includes
    /// operator; operator and annotator include viewer.
    #[must_use]
    pub fn includes(self, needed: Self) -> bool {
        use Role as R;
        match needed {
            R::Viewer => self != R::Signer,
            R::Signer => matches!(self, R::Signer | R::Admin),
            R::Annotator => matches!(self, R::Annotator | R::Admin),
            R::Operator => matches!(self, R::Operator | R::Approver | R::Admin),
            R::Approver => matches!(self, R::Approver | R::Admin),
            R::Admin => self == R::Admin,
        }
    }
}

state_enum! {
    /// Kind of candidate and of bundle.
    BundleKind {
        Weights = "weights",
        Adapter = "adapter",
        Prompt = "prompt",
        Index = "index",
        Embedder = "embedder",
        Sampling = "sampling",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_round_trip() {
        for s in RolloutState::ALL {
            assert_eq!(s.as_str().parse::<RolloutState>().unwrap(), *s);
        }
        assert!("ROLLED".parse::<RolloutState>().is_err());
        assert_eq!(serde_json::to_string(&Verdict::Pass).unwrap(), "\"PASS\"");
    }

    #[test]
    fn every_open_rollout_with_devices_can_roll_back() {
        for s in [
            RolloutState::Ring,
            RolloutState::Canary,
            RolloutState::Ramping,
            RolloutState::Holding,
            RolloutState::Paused,
            RolloutState::Complete,
        ] {
            assert!(s.can_become(RolloutState::RollingBack), "{s}");
        }
        assert!(!RolloutState::RolledBack.can_become(RolloutState::Ring));
    }

    #[test]
    fn frozen_chunk_never_becomes_active_silently() {
        assert!(!ChunkState::Frozen.can_become(ChunkState::Active));
        assert!(ChunkState::CanaryActive.can_become(ChunkState::Active));
    }

    #[test]
    fn roles_include_downwards_only() {
        assert!(Role::Admin.includes(Role::Annotator));
        assert!(!Role::Operator.includes(Role::Annotator));
        assert!(!Role::Operator.includes(Role::Approver));
        assert!(Role::Annotator.includes(Role::Viewer));
        assert!(!Role::Signer.includes(Role::Viewer));
        assert!(!Role::Approver.includes(Role::Signer));
    }
}
