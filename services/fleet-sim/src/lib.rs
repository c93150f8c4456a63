//! Simulated phones on the real SDK. Each phone has its own identity, state folder, queue, metadata trust and
//! randomness; only public HTTP connects it to a server. What is simulated is the world around the SDK: hardware,
//! networks, latency, users. Given the same seed and the same server answers, every phone does the same.
//!
//! [`Fleet`] drives all phones through one tick of business time: poll and install, load, sync the index, ask,
//! answer (one call of [`Brain::answer`] for the distinct questions of the whole fleet), judge, upload.

pub mod behaviour;
pub mod brain;
pub mod fleet;
pub mod latency;
pub mod link;
pub mod phone;
pub mod profile;
pub mod workload;

pub use behaviour::{Behaviour, Honest, Judgement, RandomRejecter, Spammer, Verdict};
pub use brain::{Brain, BrainAnswer, BrainAsk, LoadTrial};
pub use fleet::{Fleet, FleetConfig, FleetError, TickReport};
pub use latency::{ClassSpeed, LatencyModel};
pub use link::{Link, LinkFault};
pub use phone::{Phone, PhoneTick};
pub use profile::{Profile, ProfileMix};
pub use workload::{Ask, Question, Ranking, Retriever, UniformWorkload, Workload};
