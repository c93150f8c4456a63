//! The scheduler against requests run alone.

use super::super::tests::{some_adapter, some_tokens, tiny, tiny_file, tiny_file_with};
use super::super::{Arch, GenerateOptions};
use super::*;

fn request(prompt: Vec<u32>, adapter: Option<&str>, new: usize) -> Request {
    Request {
        prompt,
        adapter: adapter.map(str::to_owned),
        max_new_tokens: new,
        stop_ids: vec![7],
        sampling: Sampling::GREEDY,
        stream: 0,
    }
}

/// What came of all passes so far.
#[derive(Default)]
struct Log {
    tokens: BTreeMap<RequestId, Vec<u32>>,
    done: BTreeMap<RequestId, Generated>,
}

impl Log {
    fn step(&mut self, scheduler: &mut Scheduler) {
        for event in scheduler.step().unwrap() {
            match event {
                Event::Token { request, token } => self.tokens.entry(request).or_default().push(token),
                Event::Done { request, generated } => {
                    assert_eq!(self.tokens.remove(&request).unwrap_or_default(), generated.tokens);
                    self.done.insert(request, generated);
                }
            }
        }
    }
    fn run(&mut self, scheduler: &mut Scheduler) {
        while scheduler.open_requests() > 0 {
            self.step(scheduler);
        }
        assert!(scheduler.step().unwrap().is_empty());
    }
}

fn alone(decoder: &Decoder, request: &Request) -> Generated {
    let options = GenerateOptions {
        max_new_tokens: request.max_new_tokens,
        stop_ids: request.stop_ids.clone(),
        sampling: request.sampling,
        ..GenerateOptions::default()
    };
    decoder.generate_batch(std::slice::from_ref(&request.prompt), &options).unwrap().remove(0)
}

#[test]
fn requests_of_different_adapters_get_what_they_get_alone() {
    let model = tiny(Arch::Llama);
    let adapters = [("a", some_adapter(&model, 2)), ("b", some_adapter(&model, 3))];
    let mut scheduler =
        Scheduler::new(model.clone(), ServeOptions { max_batch: 4, ..ServeOptions::default() }).unwrap();
    for (name, adapter) in &adapters {
        scheduler.add_adapter(name, adapter).unwrap();
    }
    let (mut want, mut log) = (BTreeMap::new(), Log::default());
    for i in 0..11usize {
        let name = [None, Some("a"), Some("b")][i % 3];
        let prompt = some_tokens(10 + 13 * i, i as u32);
        let r = request(prompt, name, 5 + i);
        let decoder = match name {
            None => model.clone(),
            Some(name) => model.with_adapter(&adapters.iter().find(|a| a.0 == name).unwrap().1).unwrap(),
        };
        let expected = alone(&decoder, &r);
        want.insert(scheduler.submit(r).unwrap(), expected);
        if i == 6 {
            log.step(&mut scheduler); // the rest comes while others are in work
        }
    }
    log.run(&mut scheduler);
    assert_eq!(log.done, want);
}

#[test]
fn a_pass_never_mixes_adapters_and_all_take_turns() {
    let model = tiny(Arch::Llama);
    let mut scheduler = Scheduler::new(model.clone(), ServeOptions::default()).unwrap();
    scheduler.add_adapter("a", &some_adapter(&model, 2)).unwrap();
    let plain: Vec<_> = (0..2).map(|i| scheduler.submit(request(some_tokens(9, i), None, 6)).unwrap()).collect();
    let adapted: Vec<_> = (0..2).map(|i| scheduler.submit(request(some_tokens(9, i), Some("a"), 6)).unwrap()).collect();
    for pass in 0..4 {
        let events = scheduler.step().unwrap();
        let own = if pass % 2 == 0 { &plain } else { &adapted };
        assert!(!events.is_empty());
        for event in events {
            let (Event::Token { request, .. } | Event::Done { request, .. }) = event;
            assert!(own.contains(&request), "pass {pass}");
        }
    }
}

#[test]
fn a_known_beginning_is_not_computed_again_and_changes_nothing() {
    let model = tiny(Arch::Qwen2);
    for cache in [KvType::Q8_0, KvType::F16] {
        let options = ServeOptions { cache, max_batch: 8, ..ServeOptions::default() };
        let mut scheduler = Scheduler::new(model.clone(), options).unwrap();
        let common = some_tokens(150, 4);
        let prompts: Vec<Vec<u32>> = (0..5u32).map(|i| [common.clone(), some_tokens(6, i)].concat()).collect();
        let ids: Vec<_> = prompts.iter().map(|p| scheduler.submit(request(p.clone(), None, 8)).unwrap()).collect();
        // The first computes the beginning, the others wait for it and then start behind it.
        let mut log = Log::default();
        log.step(&mut scheduler);
        assert_eq!(scheduler.active.len(), 1);
        scheduler.admit();
        assert_eq!(scheduler.active.iter().map(|a| a.cache.len()).collect::<Vec<_>>(), [156, 128, 128, 128, 128]);
        log.run(&mut scheduler);
        let plain = GenerateOptions { max_new_tokens: 8, stop_ids: vec![7], cache, ..GenerateOptions::default() };
        for (id, prompt) in ids.iter().zip(&prompts) {
            let want = model.generate_batch(std::slice::from_ref(prompt), &plain).unwrap().remove(0);
            assert_eq!(log.done[id], want);
        }
        // A later request for the same prompt has its full pages at once.
        scheduler.submit(request(prompts[0].clone(), None, 8)).unwrap();
        scheduler.admit();
        assert_eq!(scheduler.active[0].cache.len(), 128);
    }
}

#[test]
fn what_cannot_be_run_is_refused_and_what_runs_can_be_cancelled() {
    let model = tiny(Arch::Llama);
    assert!(Scheduler::new(model.clone(), ServeOptions { max_batch: 0, ..ServeOptions::default() }).is_err());
    let mut scheduler = Scheduler::new(model.clone(), ServeOptions::default()).unwrap();
    let adapter = some_adapter(&model, 2);
    scheduler.add_adapter("a", &adapter).unwrap();
    assert!(scheduler.add_adapter("a", &adapter).unwrap_err().to_string().contains("taken"));
    let other = Decoder::load(&tiny_file_with(Arch::Llama, |_, t| t[0].2[0] += 0.5)).unwrap();
    assert!(scheduler.add_adapter("b", &some_adapter(&other, 2)).is_err());
    let refuse = |s: &mut Scheduler, r: Request| s.submit(r).unwrap_err().to_string();
    assert!(refuse(&mut scheduler, request(vec![1], Some("b"), 4)).contains("`b` is not loaded"));
    assert!(refuse(&mut scheduler, request(vec![], None, 4)).contains("no tokens"));
    assert!(refuse(&mut scheduler, request(vec![50], None, 4)).contains("token 50"));
    assert!(refuse(&mut scheduler, request(vec![1], None, 0)).contains("max_new_tokens"));
    let hot = Request { sampling: Sampling { temperature: -1.0, ..Sampling::GREEDY }, ..request(vec![1], None, 4) };
    assert!(refuse(&mut scheduler, hot).contains("temperature"));
    let id = scheduler.submit(request(some_tokens(9, 1), Some("a"), 100)).unwrap();
    scheduler.step().unwrap();
    assert!(scheduler.cancel(id) && !scheduler.cancel(id));
    assert_eq!(scheduler.open_requests(), 0);
}

/// 8-bit keys and values stay near those of 16 bits: logits move little.
#[test]
fn both_kinds_of_cache_give_nearly_the_same() {
    for arch in [Arch::Llama, Arch::Qwen3] {
        let model = Decoder::load(&tiny_file(arch)).unwrap();
        let tokens = some_tokens(150, 2);
        let logits = |kv: KvType| {
            let mut cache = model.new_sequence_of(kv);
            let rows = model.advance(&mut [Step { cache: &mut cache, tokens: &tokens }]);
            model.raw_logits_of(&rows, tokens.len())
        };
        let (a, b) = (logits(KvType::Q8_0), logits(KvType::F16));
        let rms =
            |v: &mut dyn Iterator<Item = f32>| (v.map(|x| f64::from(x).powi(2)).sum::<f64>() / a.len() as f64).sqrt();
        let (off, size) = (rms(&mut a.iter().zip(&b).map(|(x, y)| x - y)), rms(&mut b.iter().copied()));
        assert!(off > 0.0 && off < 0.01 * size, "{arch:?}: {off} of {size}");
    }
}
