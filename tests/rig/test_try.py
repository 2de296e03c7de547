import time,sys,cProfile,pstats,os,threading
from tests.rig.rig import Rig
P=[[1]+[(7*i+j*13)%250+10 for j in range(5+i)] for i in range(7)]
def psd(models, draft, k):
    before=set(sys.modules)
    pr=cProfile.Profile(); pr.enable()
    rig=Rig(models, draft, k)
    pr.disable()
    pstats.Stats(pr).sort_stats('cumtime').print_stats(50)
    new=set(sys.modules)-before
    print(len(new), sorted(new)[:300])
    with rig:
        o=rig.run(P, 20)
        rig.idle_check()
def test_try(run_case, models):
    t=time.time()
    a=run_case(psd, models, 'D_same', 3); print('case',time.time()-t)
